"""Optimizers by name, and the layouts in which each of them is correct.

A stage's optimizer sees the parameters of its own segments, and under tensor parallelism and ZeRO a
shard of each. An elementwise update is correct on shards. One that takes norms over a parameter
gets those; one that takes factors gets whole parameters, which ranks gather for it. An optimizer
that looks for modules or for the whole model is correct on neither. What a name stands for is
judged by what it does, too: `merak.engine.optimizer`.
"""

from __future__ import annotations

from merak.arguments.rules import Layout, Rule, honoured, refused

_ELEMENTWISE = honoured("its update is elementwise, so it is correct on every shard of a parameter")
_BNB = honoured("its update is elementwise; it needs bitsandbytes")
_WHOLE = "tensor parallel ranks hold a shard of each parameter; use 'adamw_torch', or tp=1"
_PER_PARAMETER = honoured(
    "its update looks at whole parameters; where ranks have shards, each is gathered on one of "
    "them, or ranks reduce norms over shards where it needs no more"
)
_BLOCKWISE = refused(
    f"it quantises its state in blocks of a whole parameter, and {_WHOLE}",
    layout=Layout.TENSOR_PARALLEL,
)
_EMBEDDINGS = refused(
    "it keeps embeddings in 32 bits by looking for nn.Embedding modules, which a traced model "
    "does not have; use 'adamw_torch' or the optimizer's 32-bit variant"
)
_MODULES = refused(
    "it projects the gradients of named nn.Linear modules, which a traced model does not have; "
    "use 'adamw_torch'"
)
_FUSED_BACKWARD = refused(
    "it updates parameters inside the backward pass, before gradients are reduced over ranks; "
    "use 'adamw_torch' or 'adafactor'"
)
_GLOBAL = refused(
    "it clips by a norm over all parameters and counts layers, of which a stage sees only its "
    "own; use 'adamw_torch'"
)
_DEVICE = refused("Merak runs on CPU and CUDA devices; use 'adamw_torch' or 'adamw_torch_fused'")

_NAMES: tuple[tuple[Rule, str], ...] = (
    (
        _ELEMENTWISE,
        "adamw_torch adamw_torch_fused adamw_anyprecision sgd adagrad rmsprop "
        "schedule_free_adamw schedule_free_radam schedule_free_sgd",
    ),
    (
        _BNB,
        "ademamix lion_32bit paged_adamw_32bit paged_ademamix_32bit paged_lion_32bit "
        "rmsprop_bnb rmsprop_bnb_32bit",
    ),
    (_PER_PARAMETER, "adafactor stable_adamw"),
    (_BLOCKWISE, "adamw_torch_4bit adamw_torch_8bit"),
    (
        _EMBEDDINGS,
        "adamw_bnb_8bit adamw_8bit ademamix_8bit lion_8bit paged_adamw_8bit "
        "paged_ademamix_8bit paged_lion_8bit rmsprop_bnb_8bit",
    ),
    (
        _MODULES,
        "galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise "
        "galore_adamw_8bit_layerwise galore_adafactor_layerwise apollo_adamw "
        "apollo_adamw_layerwise",
    ),
    (_FUSED_BACKWARD, "lomo adalomo"),
    (_GLOBAL, "grokadamw"),
    (_DEVICE, "adamw_torch_xla adamw_torch_npu_fused"),
)
"""Names of optimizers by their decision."""

OPTIMIZERS = {name: rule for rule, names in _NAMES for name in names.split()}
"""Decision by optimizer name; a name that is not here is refused."""
