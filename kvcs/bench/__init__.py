"""How fast kvcs is beside raw QUIC of the same backend, and beside others, on loopback.

``kvcs bench`` runs it; see docs/bench.md for what each group measures. Every case runs in processes
of its own, and the cases of a group take turns within each round: machines are noisy, so only what
was measured in one run may be compared. Read the ratios first.
"""
