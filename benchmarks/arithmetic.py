"""Memory of a training step by hand: what one can work out on paper before a card is rented.

What goes wrong: a run ends out of memory after an hour, and nobody had asked what it needs. Each function here is one
question, answered by multiplication; `step` puts the answers together at the moments of a step at which much is held.
It knows Qwen2 and Llama (RMSNorm, gated MLP, grouped keys), a fused attention kernel, and a softmax in float32; it does
not know temporary results of a few rows, nor adapters. `simulate.peak_memory` counts them; `predicted.py` holds
both against what a device says.

All sizes are bytes; `element` is those of a number of weights and activations, 4 in float32 and 2 in bfloat16.
"""

import dataclasses

FLOAT = 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What of a model's shape the arithmetic needs.

    Attributes:
        width: of hidden states.
        intermediate: width of the MLP.
        keys: width of all keys of a token, heads that share keys counted once.
        layers: how many.
        vocabulary: how many tokens there are.
        tied: whether head and embedding are one tensor.
        element: bytes of a weight.
    """

    width: int
    intermediate: int
    keys: int
    layers: int
    vocabulary: int
    tied: bool = True
    element: int = FLOAT


def layer_weights(sizes: Sizes) -> int:
    """Return the numbers in the linear layers of one decoder layer: attention's four, the MLP's three, no biases."""
    return 2 * sizes.width * (sizes.width + sizes.keys) + 3 * sizes.width * sizes.intermediate


def weights(sizes: Sizes) -> int:
    """Return the bytes of all weights: embedding, head, and per layer its linear layers, three biases, two norms."""
    small = sizes.layers * (3 * sizes.width + 2 * sizes.keys) + sizes.width
    ends = sizes.vocabulary * sizes.width * (1 if sizes.tied else 2)
    return sizes.element * (ends + sizes.layers * layer_weights(sizes) + small)


def four_bit_weights(sizes: Sizes) -> int:
    """Return the same with the linear layers of the decoder in 4 bit: half a byte, and a float32 scale for each 64."""
    linear = sizes.layers * layer_weights(sizes)
    return weights(sizes) - sizes.element * linear + linear // 2 + FLOAT * (linear // 64)


def layer_activations(sizes: Sizes, tokens: int) -> int:
    """Return what one layer keeps for its backward pass.

    Two norms keep their input, in float32, and it normalized; then there are the inputs of two groups of linear layers,
    queries, keys, values, attention's output, and four results of the MLP.
    """
    narrow = 6 * sizes.width + 2 * sizes.keys + 4 * sizes.intermediate
    return tokens * (2 * FLOAT * sizes.width + sizes.element * narrow)


def kept_by_layers(sizes: Sizes, tokens: int, checkpointing: bool) -> int:
    """Return what all layers keep until backward: everything, or under checkpointing the input of each."""
    layer = tokens * sizes.width * sizes.element if checkpointing else layer_activations(sizes, tokens)
    return sizes.layers * layer


def logits(rows: int, vocabulary: int, element: int = FLOAT) -> int:
    """Return rows x vocabulary x bytes: the product that ends most runs."""
    return rows * vocabulary * element


def head(sizes: Sizes, batch: int, prompt: int, completion: int, way: str, chunk: int) -> int:
    """Return the most that scoring holds at once beyond what layers keep, the head's gradient included.

    `full` and `kept` logits are the same but for the rows that the model returns. Three moments: logits, their float32
    copy and its log-softmax; the log-softmax, its gradient and that of its input; the gradient of all returned rows and
    of the head's weight. `chunked` logits: `chunk` rows, and the weight's gradient.
    """
    weight = sizes.vocabulary * sizes.width * sizes.element
    if way == "chunked":
        half = logits(chunk, sizes.vocabulary, sizes.element) if sizes.element < FLOAT else 0
        return weight + logits(chunk, sizes.vocabulary) + half
    scored = logits(batch * completion, sizes.vocabulary)
    returned = batch * (prompt + completion if way == "full" else completion + 1)
    whole = logits(returned, sizes.vocabulary, sizes.element)
    return max(whole + 2 * scored, 3 * scored, whole + weight)


def step(
    sizes: Sizes,
    batch: int,
    prompt: int,
    completion: int,
    way: str = "kept",
    checkpointing: bool = False,
    chunk: int = 0,
) -> int:
    """Return the peak of a forward and backward pass beyond the weights, gradients included.

    Three moments: at the head; in the last layer's backward pass, where a checkpointed layer is computed again; and at
    the end, where all gradients are there, of a tied weight two before they are added (chunked scoring makes one).
    """
    tokens = batch * (prompt + completion)
    kept = kept_by_layers(sizes, tokens, checkpointing)
    end = sizes.vocabulary * sizes.width * sizes.element
    layer = kept // sizes.layers
    again = layer_activations(sizes, tokens) if checkpointing else 0
    running = again + 2 * tokens * sizes.intermediate * sizes.element  # the MLP's two gradients
    of_layer = layer_weights(sizes) * sizes.element
    last = kept + end + running
    first = layer + weights(sizes) - of_layer + running
    second = end if sizes.tied and way != "chunked" else 0
    return max(kept + head(sizes, batch, prompt, completion, way, chunk), last, first, weights(sizes) + second)
