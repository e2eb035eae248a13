"""The TCP endpoint: a connection per rail, on several addresses or paths."""
