"""How ballonet enters programs: `run`, notebooks, models managed at first use, and what `info MODEL` says.

The face: `find` and `run` (run.py), `load_ipython_extension` and `unload_ipython_extension` (first_use.py), `gather`
and `show` (facts.py, model_info.py), `widths_of` (model_info.py).
"""
