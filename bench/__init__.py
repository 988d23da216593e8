"""How fast kvcs is beside raw QUIC of the same backend, measured on loopback.

python -m bench                 five rounds, about two minutes
python -m bench --short         a smaller run, about half a minute
python -m bench --short --json  the same, as one JSON object of named ratios and figures

Every row runs in processes of its own, and the rows take turns within each round: machines are
noisy, so only what was measured in one run may be compared. Read the ratios first.
"""
