"""Weight sync: transfers weights from the ranks that train to the members that sample.

Start at `sync.WeightSync`. `planning` has no I/O, `transfer` runs a push, `channels` move the bytes, `cuda` has copies
and checksums on GPUs. No module needs torch unless its tensors are torch's.
"""
