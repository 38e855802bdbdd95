"""What other processes and files say, changed at random: no reader may break over it."""
