"""Prefixes that are kept: what generate() leaves behind is found again by the prompts that begin with it."""
