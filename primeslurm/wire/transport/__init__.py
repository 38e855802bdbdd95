"""How processes reach and authenticate each other: addresses, HTTP, ZMQ, rendezvous of ranks, the secret, retries."""
