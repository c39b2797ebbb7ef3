"""What travels between ranks, how it is summed to the bit, and which ranks there are."""
