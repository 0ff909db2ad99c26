"""What the Neural Engine runs and what it rejects: one checked list, as data; each entry with its reason and source.

Apple documents no such list, so it is collected from those who looked: Apple's authoring notes for Core AI, a published
set of Gemma 4 chunks that answers on a phone's engine, and measurements of the engine below its frameworks. Nothing
here was measured on an engine by this project. The engine's compiler has the last word: a rejected operator does not
fail, it moves to another unit with all that hangs on it, and what is computed stays right (apart from the entries that
say "wrong"). So a bundle that keeps to this list may still be moved; one that does not surely is.
"""

from dataclasses import dataclass

SOURCES: dict[str, str] = {
    "notes": "apple/coreai-models, model-authoring notes: common_issues.md, and neural_engine_rules.md as quoted in "
    "coreai-model-zoo, knowledge/compute-units-and-authoring.md",
    "ios": "apple/coreai-models, models/ios/gemma4_text.py and primitives/ios",
    "sam3": "apple/coreai-models, segmentation/pipeline.py",
    "chunks": "coreai-model-zoo, models/ios/gemma4_ane_chunks.py: 8 of 8 tokens on an iPhone 17 Pro's engine",
    "cost": "coreai-model-zoo, knowledge/coreai-ane-partition-cost.md: measured on an iPhone 17 Pro",
    "catalog": "ANEForge, aneforge/_op_catalog.py: probed on M1, M2 and M5",
    "cliffs": "ANEForge, docs/numeric-cliffs.md: measured on M2 Pro and M5",
    "numerics": "S. H. Bryngelson, Apple Neural Engine, arXiv:2606.22283, chapter 3",
    "weights": "S. H. Bryngelson, Apple Neural Engine, arXiv:2606.22283, chapter 7",
    "shapes": "S. H. Bryngelson, Apple Neural Engine, arXiv:2606.22283, chapter 17",
}


@dataclass(frozen=True)
class Rule:
    """Whether something may stand in a graph for the engine, why, and who says so: keys of `SOURCES`."""

    allowed: bool
    reason: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Limit:
    """The largest size of something, why, and who says so."""

    largest: int
    reason: str
    sources: tuple[str, ...]


def _native(reason: str, *sources: str) -> Rule:
    return Rule(True, reason, sources or ("catalog",))


def _rejected(reason: str, *sources: str) -> Rule:
    return Rule(False, reason, sources or ("catalog",))


_ELEMENTWISE = _native("elementwise, native")
_TABLE = _native("from a table of 33 knots, exact to half a unit of float16", "numerics")
_SHAPE = _native("moves data only, native")
_NOWHERE = _rejected("has no path on any generation")
_CONTROL = _rejected("control flow has no code there: unroll it")
_STATE = _rejected("a chunk has no state, its host keeps the kv_cache: writes in place crash", "chunks")

OPERATORS: dict[str, Rule] = {
    # Products. Both sum in a wide register by the guide; what was seen on a phone differs for matmuls.
    "conv2d": _native("the form for stored weights: sums in float32", "notes", "chunks"),
    "batch_matmul": _native("for two computed operands; depth 1 (batch and heads broadcast)", "shapes"),
    "lut_to_dense": _native("palettes are the one packed form that every generation reads packed", "weights"),
    # Elementwise and reductions.
    "add": _ELEMENTWISE,
    "sub": _ELEMENTWISE,
    "mul": _ELEMENTWISE,
    "divide": _ELEMENTWISE,
    "maximum": _ELEMENTWISE,
    "minimum": _ELEMENTWISE,
    "abs": _ELEMENTWISE,
    "pow": _ELEMENTWISE,
    "relu": _ELEMENTWISE,
    "equal": _ELEMENTWISE,
    "not_equal": _ELEMENTWISE,
    "greater": _ELEMENTWISE,
    "where": _ELEMENTWISE,
    "reduce_max": _native("native"),
    "reduce_min": _native("native"),
    "reduce_sum": _native("native; the sum is wide, the result float16"),
    "reduce_mean": _native("native; of squares only what was scaled first, or they overflow"),
    "argmax": _native("native along an axis, over few values (see `argmax axis`)"),
    "exp": _TABLE,
    "sigmoid": _TABLE,
    "gelu": _native("native, from a table; Apple's own Gemma 4 for the engine uses it", "numerics", "ios"),
    "softmax": _native("native; masked with finite numbers only", "catalog", "notes"),
    "rsqrt": _TABLE,
    "sqrt": _TABLE,
    # Shapes.
    "constant": _SHAPE,
    "output": _SHAPE,
    "concat": _SHAPE,
    "slice": _SHAPE,
    "split": _SHAPE,
    "reshape": _SHAPE,
    "transpose": _SHAPE,
    "expand_dims": _SHAPE,
    "shrink_dims": _SHAPE,
    "broadcast_to": _native("from axes of length one", "shapes"),
    "broadcast_in_dims": _native("from axes of length one", "shapes"),
    "cast": _native("at the edge of the graph, and from a comparison (see `cast inside`)"),
    "invoke": _native("of a composite on the list"),
    # Rejected.
    "sin": _rejected("native from A15 on only, and off by up to 0.1 near the seams", "catalog", "numerics"),
    "cos": _rejected("native from A15 on only, and off by up to 0.1 near the seams", "catalog", "numerics"),
    "gather_nd": _rejected("its result of three axes is rejected", "notes"),
    "gather_along_axis": _rejected("only in a narrow envelope of shapes", "shapes"),
    "silu": _rejected(
        "becomes a cast to float32, an operator in it, and a cast back: x * sigmoid(x)", "notes"
    ),
    "tanh": _rejected("moves off: 2 * sigmoid(2x) - 1", "notes"),
    "metal4_kernel": _rejected("fixed operators only, no kernels", "notes"),
    "sort": _rejected("a boundary of fixed cost", "cost"),
    "argsort": _rejected("a boundary of fixed cost", "cost"),
    "slice_update": _STATE,
    "read_handle": _STATE,
    "write_handle": _STATE,
    "if": _CONTROL,
    "while": _CONTROL,
    "scan": _CONTROL,
    "get_shape": _NOWHERE,
    "range": _rejected("rejected by the code generator: store the constant"),
    "non_zero": _NOWHERE,
    "scatter_nd": _NOWHERE,
    "scatter_along_axis": _NOWHERE,
    "modulo": _NOWHERE,
    "and": _NOWHERE,
    "or": _NOWHERE,
    "xor": _NOWHERE,
    "reduce_product": _NOWHERE,
    "tan": _NOWHERE,
    "sinh": _NOWHERE,
    "cosh": _NOWHERE,
    "blockwise_shift_scale": _rejected(
        "linear 4 bit codes do not compile, silently another unit runs them", "chunks"
    ),
}
"""By the name of the operator without its dialect, and without `broadcasting_`."""

COMPOSITES: dict[str, Rule] = {
    "layer_norm": _native(
        "one operator, its sums in float32 whatever the types of its parts say", "chunks", "notes"
    ),
    "scaled_dot_product_attention": _rejected(
        "wrong: the engine's fused attention ignores the mask", "chunks"
    ),
    "rms_norm": _rejected("wrong: squares in float16, which overflow on Gemma's activations", "chunks"),
    "rope": _rejected("has sine and cosine in it", "notes"),
}
"""By the name of a composite's declaration. What stands in its body is for units that do not know it."""

DTYPES: dict[str, Rule] = {
    "f16": _native("the one type of the engine's data", "shapes", "notes"),
    "i1": _native("of a comparison, within the graph"),
    "ui8": _native("as codes of a palette", "weights"),
    "ui4": _native("as codes of a palette", "weights"),
    "f32": _rejected("a cast to it is dropped, or the operator moves to another unit", "notes", "chunks"),
    "bf16": _rejected("has no path", "shapes"),
    "si32": _rejected("there are no integers beyond 16 bit", "shapes"),
    "ui32": _rejected("there are no integers beyond 16 bit", "shapes"),
}
"""Of what an operator gives. At the edge of a graph others may stand, see `cast inside` and `integer inside`."""

LIMITS: dict[str, Limit] = {
    "rank": Limit(
        5,
        "more axes are rejected",
        ("notes", "sam3"),
    ),
    "width or height": Limit(16384, "the last two axes up to A15", ("shapes",)),
    "axis": Limit(65536, "any other axis, on any generation", ("shapes",)),
    "argmax axis": Limit(2048, "indices come in float16, which counts to 2048", ("shapes",)),
}

PATTERNS: dict[str, Rule] = {
    "matmul by stored weights": _rejected(
        "sums in float16 or moves off the engine: a 1x1 conv2d", "notes", "chunks"
    ),
    "concat of inputs": _rejected(
        "wrong: of two inputs of the graph (input and computed is right)", "chunks"
    ),
    "cast inside": _rejected(
        "types other than float16 only as inputs, outputs and their casts", "notes", "chunks"
    ),
    "integer inside": _rejected("integers only where nothing but outputs comes of them", "shapes"),
    "constant in float32": _rejected("makes its operator one in float32", "notes"),
    "infinite constant": _rejected("wrong: a mask of -inf is mishandled", "notes"),
    "dynamic shape": _rejected("all shapes are static", "notes"),
}

ASSUMED: dict[str, Rule] = {
    "wide sums": _native("a sum of float16 products is held in about float32", "numerics", "chunks"),
    "largest product": _native("a matmul's result is finite below 32752", "cliffs"),
    "largest slice": _native(
        "a slice off the start of the last axis is finite below 4094 before A16", "cliffs"
    ),
}
"""What no look at a graph can tell: the evidence in float16 (`gates/fp16_evidence.py`) rests on it."""
