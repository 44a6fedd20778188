"""The name of the backend, and the devices it serves."""

NAME = "pipecomm"
MIN_TORCH = (2, 14)
DEVICES = ["cpu", "cuda"]
