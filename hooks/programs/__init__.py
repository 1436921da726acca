"""How ballonet enters programs: `run`, notebooks, models managed at first use, and what `info MODEL` says."""
