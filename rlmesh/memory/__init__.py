"""Big buffers on one node: a pool of reused shared-memory segments, one copy in and none out.

The runtime uses `exchange.MemoryExchange`, which combines the sender's half (`pool`) and the receiver's (`attach`).
"""
