"""Attention sites of a Dynamo graph, counted without FlashFX's own finder.

A site is a softmax with a product of two activations above it (through views and elementwise ops) and one below it, a
`scaled_dot_product_attention` call, or a call of one of PyTorch's own layers. Counting before and after the rewrite gives the
number of sites that are gone.
"""
from __future__ import annotations

import operator

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor

from flashfx.compat import size_hint
from flashfx.spec import AttentionSpec

PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "mm", "__matmul__", "__rmatmul__"}
SOFTMAX = {"softmax", "_softmax"}
IN_PLACE = {"iadd", "isub", "imul", "itruediv", "setitem"}
CALLS = {"scaled_dot_product_attention", "multi_head_attention_forward", "_transformer_encoder_layer_fwd"}
BETWEEN = set("""
    view reshape permute transpose contiguous expand unsqueeze squeeze flatten unflatten repeat clone to type_as float half type bfloat16 double
    swapaxes movedim t mT getitem chunk split unbind detach expand_as view_as narrow select repeat_interleave cat pad
    add add_ sub sub_ mul mul_ div div_ truediv iadd imul itruediv isub masked_fill masked_fill_ where clamp clamp_ max min maximum minimum
    tanh neg rsub dropout dropout_ nan_to_num sigmoid pow exp sqrt abs alpha_dropout slice_scatter copy_ setitem amax
""".split())


def name_of(node: fx.Node) -> str:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.removesuffix(".default").removesuffix(".Tensor")


VIEWS = {"view", "reshape", "permute", "transpose", "t", "mT", "expand", "unsqueeze", "squeeze", "to", "float", "contiguous", "getitem", "type_as"}


def _is_parameter(node: fx.Node) -> bool:
    while node.op in ("call_method", "call_function") and node.all_input_nodes and name_of(node) in VIEWS:
        node = node.all_input_nodes[0]
    return node.op == "get_attr" or isinstance(node.meta.get("example_value"), torch.nn.Parameter)


def is_product(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or not (name_of(node) in PRODUCTS or node.target is operator.matmul):
        return False
    operands = node.all_input_nodes
    return len(operands) >= 2 and not any(_is_parameter(a) for a in operands[-2:])


def _reaches(starts, step) -> bool:
    seen, todo = set(), list(starts)
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        if is_product(n):
            return True
        if n.op in ("call_function", "call_method") and name_of(n) in BETWEEN:
            todo.extend(step(n))
    return False


def between(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes that make the scores of the sites of a graph: everything above the softmaxes (or the mask of a call), products and what is above them aside."""
    found: set[fx.Node] = set()
    for module in _modules(gm):
        todo = []
        for n in module.graph.nodes:
            if n.op in ("call_function", "call_method") and name_of(n) in CALLS | SOFTMAX:
                first = 3 if name_of(n) in CALLS else 0
                todo += [a for a in (*n.args[first:], *n.kwargs.values()) if isinstance(a, fx.Node)]
        while todo:
            n = todo.pop()
            if n not in found and not is_product(n):
                found.add(n)
                todo += n.all_input_nodes
                todo += [u for u in n.users if name_of(u).endswith("_") or name_of(u) in IN_PLACE]
    return found


def matrices(gm: fx.GraphModule, scores: set[fx.Node], regions) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Nodes of a rewritten graph with an element for every query and key of a fused site: (those that make masks, those that make biases, those that
    would be there without attention, because the model reads them itself or hands them out).

    scores: what `between` said before the rewrite; what is left of that and what the attention ops read as captured tensors is looked at,
    because elsewhere a shape says nothing. A bias is a tensor whose elements the scores add, and what that is made of. Inputs and views of
    them are not made here, expanded views hold fewer elements than their shape says.
    """
    sizes = {(r.problem.M, r.problem.N) for r in regions if r.fused and r.problem.M > 1 and r.problem.N > 1}
    masks, biases, own = [], [], []
    for module in _modules(gm):
        read: dict[bool, list[fx.Node]] = {True: [], False: []}
        for n in module.graph.nodes:
            if str(n.target) == "flashfx.attention.default":
                spec = AttentionSpec.parse(n.args[6])
                scored = {load.name for load in spec.score.loads if {"i", "j"} <= load.variables}
                for a, node in zip(spec.aux, n.args[3]):
                    read[a.name in scored].append(node)
        mask, bias = _above(read[False]), _above(read[True])
        elsewhere = _above([module.graph.output_node()], lambda n: str(n.target).startswith("flashfx."))
        tensors = {n: t for n in module.graph.nodes if isinstance(t := n.meta.get("example_value"), torch.Tensor) and not is_functorch_wrapped_tensor(t)}
        given = {id(t.untyped_storage()) for n, t in tensors.items() if n.op in ("placeholder", "get_attr")}
        for n, t in tensors.items():  # inside vmap an element has no storage of its own
            if n.op not in ("call_function", "call_method") or id(t.untyped_storage()) in given:
                continue
            shape = tuple(map(_hint, t.shape[-2:]))
            if n in scores | mask | bias and shape in sizes and _hint(t.untyped_storage().nbytes()) >= shape[0] * shape[1] * t.element_size():
                (own if n in elsewhere else biases if n in bias else masks).append(n)
    return masks, biases, own


def _hint(size) -> int:
    """The size of the example; no guard on a symbol."""
    return size if isinstance(size, int) else size_hint(size.node.shape_env, size.node.expr)


def _modules(gm: fx.GraphModule) -> list[fx.GraphModule]:
    return list({id(m): m for m in gm.modules() if isinstance(m, fx.GraphModule)}.values())


def _above(nodes: list[fx.Node], stop=is_product) -> set[fx.Node]:
    """`nodes`, what they are made of, and what changes that in place; not beyond `stop`."""
    seen: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        n = todo.pop()
        if n not in seen and not stop(n):
            seen.add(n)
            todo += [*n.all_input_nodes, *(u for u in n.users if name_of(u).endswith("_") or name_of(u) in IN_PLACE)]
    return seen


def count_sites(gm: fx.GraphModule) -> int:
    total = 0
    for module in _modules(gm):
        for n in module.graph.nodes:
            if n.op not in ("call_function", "call_method"):
                continue
            if name_of(n) in CALLS:
                total += 1
            elif name_of(n) in SOFTMAX:
                total += _reaches(n.all_input_nodes[:1], lambda m: m.all_input_nodes) and _reaches(n.users, lambda m: m.users)
    return total
