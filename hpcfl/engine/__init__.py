"""The round loop, and how rounds are carried out in simulated and in real time."""
