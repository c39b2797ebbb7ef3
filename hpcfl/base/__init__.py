"""What every room uses: errors, names and sections of the config, random numbers by key, memory."""
