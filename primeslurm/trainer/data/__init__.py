"""What SFT and images are read from."""
