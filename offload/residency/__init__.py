"""Movement: the copies that fill slots and restore pages, backings and the files behind them."""
