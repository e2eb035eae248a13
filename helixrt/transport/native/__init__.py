"""The native data plane's ranks find each other: addresses, handshake, dialling, and an endpoint over the native engine."""
