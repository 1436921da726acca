"""The commands of `ballonet`, a file each, whose `add` describes it to argparse."""
