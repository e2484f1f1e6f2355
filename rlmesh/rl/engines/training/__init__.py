"""Training engines: a model and its optimizer, distributed over the ranks of a role.

``protocol``
    `TrainingEngine`, the interface of all engines, with its options and result types.
``ddp``
    `DDPEngine`: every rank has the whole model. Also for one process without a process group.
``fsdp2``
    `FSDP2Engine`: parameters, gradients and optimizer state are sharded, layer by layer.
``zero``
    `DeepSpeedEngine`: DeepSpeed's ZeRO, stages 1, 2 and 3.

::

    engine = FSDP2Engine(AutoModelForCausalLM.from_pretrained(path), TrainingOptions(lr=1e-6, micro_batch_size=8))
    self.send_weights(engine.named_tensors())
    old = engine.log_probs(sequences, attention_mask, action_mask)
    report = engine.train_step(experience, loss)
    engine.save(folder).result()

Import from the modules themselves: each needs other packages.
"""
