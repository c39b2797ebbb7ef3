"""Rounds in real time: they close when their plan says so, whatever any client does.

Clients are reached over *lanes*, of the server and one or a few client ranks (`hpcfl.mpi.placement`). On a lane all is
nonblocking and in a fixed order (`hpcfl.mpi.channel`): a command on the control channel (`orders`); then, on the data
channel, the shared state down and one frame after the other up (`hpcfl.sums.frames`). The server (`server`) looks at
all lanes at once (`hpcfl.mpi.transfers`), moves on those where something has happened (`lanes`, `lane`) and closes the
round when its plan says so (`hpcfl.schedule`); a lane that has not finished is late, is drained, and is invited again.
A client rank (`client`) talks MPI in its main thread and computes in a second one, where its clients live
(`hpcfl.engine.executor`). What is computed, how it travels and how it is summed stands in other rooms: here is who
says what to whom, and when.
"""
