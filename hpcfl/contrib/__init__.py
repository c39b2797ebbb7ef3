"""What few need: the core does not import it, only the commands do, through `hpcfl.contrib.facts`."""
