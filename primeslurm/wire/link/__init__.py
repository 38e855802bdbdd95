"""The link between trainer and orchestrator: idempotent ZMQ requests of the trainer.

Every request names its step or version, so a repetition after a lost answer changes nothing. A client that gets no
answer in time closes its socket, reconnects and asks again until its own deadline.

requests (trainer -> orchestrator)              answers
  GetBatch(step, shard, ...)                    batch: a Batch's bytes from an offset on | file: its path | wait |
                                                stop | transfer: engines need the policy first
  NewPolicy(version, path)                      ok: the policy is on the file system, or the trainer can send it
  OfferTransfer(version, store, senders, done)  session: engines wait in it | wait | ok: no engine needs the policy
  SessionState(session, rank)                   ok | lost: the session has lost an engine
  StepDone(step, metrics)                       ok
  Save(step, directory)                         ok: the orchestrator has written its part of the checkpoint
  Committed(step)                               ok: names the checkpoints to keep

A batch may have tens of gigabytes. The first answer has the message's header and the first CHUNK_BYTES of the arrays.
The client allocates all arrays and requests the rest chunk by chunk. Therefore no timeout depends on the size of a
batch, the bytes in flight to all ranks are bounded, and a broken connection costs one chunk. If a chunk takes longer
than the timeout (many ranks, a slow network), each repetition of its request waits twice as long. A request that is
repeated while it is being answered is answered once, to the latest connection.

A batch in a file (`batch_files`) is not sent: the rank reads it. If the rank cannot read it, it asks again, and the
orchestrator checks the file and if necessary writes it again.
"""
