"""What a run is asked to be: a table of sections, judged whole, and the presets that it may begin with."""

from hpcfl.config.config import Config, ConfigLike, Overlay, from_table, from_text, has_moved, load, of_run, to_read

__all__ = ["Config", "ConfigLike", "Overlay", "from_table", "from_text", "has_moved", "load", "of_run", "to_read"]
