"""First contact with a machine: does the driver do what ballonet assumes, and what is to be done where it does not?

    ballonet preflight

Each *probe* asks one question of the driver or of torch, in a process of its own with a time limit, so that a crash or
a hang of one ends nothing else (`run`). The answers, *facts*, are judged by pure functions (`judge` in run.py):
*differences* from what the code assumes, and *settings* that `install()` keeps to from then on
(`ballonet.allocator.findings`).
"""
