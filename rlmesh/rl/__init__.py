"""The RL layer: what turns rewards into gradients, as plain functions of tensors.

Nothing here knows of processes or calls: a function gets tensors and gives tensors, so that it can be
tested, read and copied alone. Import from the modules themselves:

``masking``
    Means, sums and whitening over the valid tokens only.
``kl``
    Estimators of the divergence from the reference policy, and rewards that carry it as a penalty.
``advantages``
    Discounted returns, generalized advantage estimation, and GRPO's comparison within groups.
``losses``
    PPO's clipped policy and value losses, entropy, and sums that do not depend on how a batch is split.
``drift``
    The gap between an engine's log-probabilities and the trainer's, and an alarm.
``engines``
    What samples and what trains, behind protocols.
``reference``
    The same in plain NumPy loops, for tests and for reading; needs no torch.

Everywhere a batch is ``[batch, time]``, where time counts the tokens of the response, and a mask is True
where the token counts. What stands in a masked slot, NaN included, changes neither values nor gradients. NaN
or infinity in a valid slot raises :class:`FloatingPointError` that names the argument and the place.
"""

from __future__ import annotations
