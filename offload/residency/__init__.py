"""Movement: the copies that fill slots and bring pages home, twins and the files behind them."""
