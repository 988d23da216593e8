"""Authorization at whoever answers requests: a relay, or a producer that listens.

`policy` decides about one request, `permits` keeps what was allowed until it ends. Neither has a
clock or a socket. `guard` joins them to the sessions of a listening endpoint.
"""
