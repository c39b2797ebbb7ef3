"""Methods as those write them who have read the documentation and nothing else: no rest, no mask, no padding."""
