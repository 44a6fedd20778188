"""What the backend is called, and what it is for."""

NAME = "pipecomm"
MIN_TORCH = (2, 14)
DEVICES = ["cpu", "cuda"]
