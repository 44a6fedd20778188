"""Code that the example programs share. No file here is a program."""
