"""How processes reach one another: addresses, links, HTTP, where ranks meet, the secret, trying again."""
