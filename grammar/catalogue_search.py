"""Codes T3xx: memory, specs that no plan fits, and what a plan adds."""

from __future__ import annotations

from titan.grammar.diagnostics import Code

ROWS: tuple[Code, ...] = (
    Code(
        "T301",
        "no plan fits the memory",
        "The peak memory of every rank stays below the limit: what the plan holds, plus context and communicators.",
        "The model, its optimizer state or one micro-batch's activations are larger than the devices allow.",
        "model = llama.llama3_405b with 8 devices",
        "Take more devices or a shorter sequence, or loosen the wishes that hold the closest plan back.",
    ),
    Code(
        "T302",
        "no legal layout",
        "Some mesh must multiply to the world size, satisfy every wish, and divide the model as the rules demand.",
        "Wishes that exclude each other, or a world size that shares no factor with heads, batch or layers.",
        "parallel { tensor = 8 pipeline >= 64 }    # on 64 devices",
        "Loosen one of the wishes named, or change the number of nodes.",
    ),
    Code(
        "T303",
        "memory at risk",
        "A plan fits when even the upper bound of its peak stays below the limit, and a reserve of 8% of the device.",
        "The point prediction fits, but with more fragmentation than usual it would not; or no margin is left.",
        "peak 71.9 GiB, upper bound 75.6 GiB, limit 73.3 GiB",
        "Try a smaller micro-batch or recompute = full, or accept the risk.",
    ),
    Code(
        "T304",
        "not a choice",
        "`--why-not` takes choices of the `parallel` section as `key=value`, separated by commas.",
        "A misspelt key, or a value that the key does not take.",
        'titan explain SPEC --why-not "tensor=8, recompute=full"',
        "Use one of the keys shown.",
    ),
    Code(
        "T305",
        "peak unknown",
        "Utilisation is a share of the device's peak, which comes from the cluster's profile.",
        "The cluster has not been measured, and its device states no peak for this precision.",
        "cluster = local.cpu",
        "Run `titan profile -o cluster.titan` and import the cluster it writes; times shown until then are rough.",
    ),
    Code(
        "T306",
        "utilisation above 100%",
        "A device executes no more FLOPs per second than its dense peak of the precision in use.",
        "The peak is of another device, precision or sparsity, the speed of more devices, or the rule counts FLOPs that"
        " were not executed, such as all scores of a causal kernel.",
        "titan mfu SPEC --tokens-per-second-per-device 90000",
        "State the dense peak of the precision, and compare with the rule that the kernels follow.",
    ),
    Code(
        "T307",
        "no plan within the limits",
        "The plan that is chosen keeps every limit of the objective: memory, step time, devices, cost of the job.",
        "A limit below what the model, the batch and the devices allow.",
        "minimize cost subject to step_time <= 1 s    # the fastest plan takes 3 s",
        "Loosen the limit to the number shown, or take more devices.",
    ),
    Code(
        "T308",
        "devices left idle",
        "A plan uses every device of the cluster, unless the objective allows fewer and fewer are better.",
        "The goal is cost, or a limit of devices or cost: then a smaller part of the cluster may be the best.",
        "minimize cost",
        "Give the cluster section as many nodes as the plan uses, or minimize step_time.",
    ),
    Code(
        "T310",
        "sequence is filled up",
        "The ranks that share a sequence hold equal pieces; masked places at its end fill it up where needed.",
        "A sequence length that is no multiple of the pieces.",
        "context = 4                 # sequence = 8190",
        "Nothing is wrong: training is the same. A multiple of the number shown saves the work on masked places.",
    ),
    Code(
        "T320",
        "tensor ranks cross nodes",
        "Tensor ranks exchange activations in every layer, so they belong behind the fastest links.",
        "A tensor degree above the devices of a node.",
        "tensor = 16 on nodes of 8 devices",
        "Take a tensor degree of one node, and pipeline, context or ZeRO for the rest.",
    ),
    Code(
        "T321",
        "dims that waste the device",
        "Matrix products in 16 bits and less run at full rate where their dims are multiples of 8, better 64.",
        "A head width or a tensor rank's share of the feed-forward width that is no such multiple.",
        "hidden = 13824, heads = 128: head_dim = 108",
        "Take other heads or another width for a new model; of a given one it is only good to know.",
    ),
    Code(
        "T322",
        "communication holds the step up",
        "Compute should not wait for links: a fifth of the step in waiting says that the layout asks too much of them.",
        "Slow links inside a node (PCIe instead of NVLink), between nodes, or a layout with much traffic.",
        "data = 8 on devices that are joined by PCIe",
        "Let the search choose the layout, take larger micro-batches or fewer ranks for the collective that is named.",
    ),
    Code(
        "T323",
        "hardware queues set otherwise",
        "Streams that share a hardware queue start their kernels in the order of issue: one queue suits tensor ranks"
        " alone, and holds back what runs ahead beside compute.",
        "CUDA_DEVICE_MAX_CONNECTIONS is set to a number that suits another layout.",
        "CUDA_DEVICE_MAX_CONNECTIONS=1 titan run spec.titan    # tensor = 2, zero = 3",
        "Leave the variable unset: a run sets the number that its plan wants.",
    ),
)
