"""Big buffers on one node: a pool of reused shared-memory segments, one copy in and none out.

`exchange.MemoryExchange` is what the runtime uses; `pool` is the sender's half, `attach` the receiver's.
"""
