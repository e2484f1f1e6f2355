"""Recorded steps, for algorithms that learn without sampling: BC and MARWIL.

Sources, as the setting ``input_`` takes them, alone or in a list:

* a `SampleBatch`, or a file of `write_batch` (``.npz``);
* a file of ``rlmesh env record`` (``.json``): the episode is played again in the environment, and compared;
* a folder, or a pattern such as ``"data/*.npz"``: all such files, in the order of their names;
* ``"minari:NAME"``, or a data set of Minari (extra ``minari``).
"""

from __future__ import annotations

from rlmesh.envs.offline.batch_files import read_batch, write_batch

__all__ = ["read_batch", "write_batch"]
