"""Weight sync: from the ranks that train to the members that sample.

`sync.WeightSync` is the way in; the plan, manifests and states are pure; `channels` carry the bytes. No module here
needs torch unless its tensors are torch's.
"""
