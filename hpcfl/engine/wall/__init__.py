"""Rounds in real time: deadlines that hold whatever any client does.

Clients are reached over *lanes*, communicators of the server and one or a few client ranks (`roster`). On a lane
there are only nonblocking collectives, in a fixed order: a `call` on the control communicator; then, on the data
communicator, the shared state down and one `group` of blocks after the other up. The server (`server`) polls its
lanes (`lane`) and closes the round when its rule says so; a lane that has not finished is late, is drained, and is
invited again. A client rank (`member`) talks MPI in its main thread and computes in a second one (`worker`).
"""
