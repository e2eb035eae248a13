"""The endpoint for peers on one host: a segment of memory each way."""
