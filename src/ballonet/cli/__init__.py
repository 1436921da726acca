"""The commands of `python -m ballonet`, a file each, whose `add` describes it to argparse."""
