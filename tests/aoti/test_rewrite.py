"""What the graph becomes, and that it still computes the same: the operators are stood in for by torch's own."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mctl.aoti import ops, packing
from mctl.aoti.ops import Activation
from mctl.aoti.rewrite import rewrite

ACTIVATIONS = {
    Activation.NONE: lambda x: x,
    Activation.RELU: F.relu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.SILU: F.silu,
    Activation.TANH: torch.tanh,
    Activation.SIGMOID: torch.sigmoid,
}


def end(y: Tensor, residual: Tensor | None, act: int) -> Tensor:
    return ACTIVATIONS[Activation(act)](y if residual is None else y + residual)


def linear(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, n: int, act: int) -> Tensor:
    assert w.shape[0] == n
    return end(F.linear(x, w, bias), residual, act)


def conv2d(x, w, bias, residual, n, kernel, stride, padding, dilation, groups, act):  # type: ignore[no-untyped-def]
    assert (w.shape[0], list(w.shape[2:])) == (n, kernel)
    return end(F.conv2d(x, w, bias, stride, padding, dilation, groups), residual, act)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: int) -> Tensor:
    assert mask is None or mask.dim() == 4
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, bool(causal), scale=scale)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights are kept as they are, and the operators run."""
    monkeypatch.setattr(packing, "pack_linear", lambda weight, dtype: weight.to(dtype, copy=True))
    monkeypatch.setattr(packing, "pack_conv2d", lambda weight, groups, dtype: weight.to(dtype, copy=True))
    with torch.library._scoped_library("mctl", "IMPL") as library:
        for function in (linear, conv2d, attention):
            library.impl(f"mctl_{function.__name__}", function, "CPU")
        yield


class Made:
    """A model, exported with a dynamic first axis and rewritten; compared with itself on another size."""

    def __init__(self, model: nn.Module, *shape: int, state: tuple[str, ...] = ()) -> None:
        model.eval()
        batch = torch.export.Dim("batch", min=1, max=64)
        with torch.no_grad():
            exported = torch.export.export(model, (torch.randn(4, *shape),), dynamic_shapes=({0: batch},))
            self.module = exported.module(check_guards=False)
            self.count = rewrite(self.module, state)
            x = torch.randn(3, *shape)
            torch.testing.assert_close(self.module(x), model(x), rtol=1e-4, atol=1e-5)
        self.mine = [node for node in self.module.graph.nodes if str(node.target).startswith("mctl.")]
        self.others = [
            str(node.target) for node in self.module.graph.nodes if node.op == "call_function" and node not in self.mine
        ]

    def activation(self, index: int = 0) -> Activation:
        node = self.mine[index]
        return Activation(node.args[5 if node.target is ops.linear else 10])

    def residual(self, index: int = 0) -> object:
        return self.mine[index].args[3]


class Named(nn.Module):
    """A model made of a function and what it uses."""

    def __init__(self, function, **parts) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize(
    ("layer", "act"),
    [
        (nn.ReLU(), Activation.RELU),
        (nn.ReLU(inplace=True), Activation.RELU),
        (nn.GELU(), Activation.GELU),
        (nn.GELU(approximate="tanh"), Activation.GELU_TANH),
        (nn.SiLU(), Activation.SILU),
        (nn.Tanh(), Activation.TANH),
        (nn.Sigmoid(), Activation.SIGMOID),
    ],
    ids=str,
)
def test_an_activation_becomes_part_of_its_layer(layer: nn.Module, act: Activation) -> None:
    made = Made(nn.Sequential(nn.Linear(8, 16), nn.Dropout(), layer), 8)
    assert (made.activation(), made.others) == (act, [])


def test_weights_in_bfloat16() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Flatten(), nn.Linear(20, 8)).eval()
    module = torch.export.export(model, (torch.randn(2, 3, 5),)).module(check_guards=False)
    assert isinstance(module, torch.fx.GraphModule) and rewrite(module, (), torch.bfloat16) == 2
    assert {name: (buffer.dtype, buffer.shape) for name, buffer in module.named_buffers()} == {
        "0_weight_packed": (torch.bfloat16, (4, 3, 1, 1)),
        "2_weight_packed": (torch.bfloat16, (8, 20)),
    }
    assert {tensor.dtype for tensor in module.parameters()} == {torch.float32}  # the biases


def test_an_unknown_activation_stays() -> None:
    made = Made(nn.Sequential(nn.Linear(8, 16), nn.ELU()), 8)
    assert (made.activation(), made.others) == (Activation.NONE, ["aten.elu.default"])


def test_a_shortcut_becomes_part_of_the_layer_and_an_activation_after_it_too() -> None:
    made = Made(Named(lambda m, x: torch.relu(m.b(torch.tanh(m.a(x))) + x), a=nn.Linear(8, 8), b=nn.Linear(8, 8)), 8)
    assert [made.activation(0), made.activation(1)] == [Activation.TANH, Activation.RELU]
    assert made.residual(0) is None and str(made.residual(1)) == "x" and made.others == []


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (y := m.a(x)) + y,  # both sides are the layer
        lambda m, x: torch.add(m.a(x), x, alpha=2),
        lambda m, x: m.a(x) + x[:, :1],  # broadcast
        lambda m, x: m.a(x) + 1,
        lambda m, x: (y := m.a(x)) + x.sum(1, keepdim=True).expand(-1, 8).clone().add_(y) * 0.5,  # seen by two
        lambda m, x: torch.relu(y := m.a(x)) * y,  # what is between is used elsewhere
        lambda m, x: x.clone().add_(m.a(x)),  # changes the other side
    ],
)
def test_what_is_not_a_plain_shortcut_stays(function) -> None:  # type: ignore[no-untyped-def]
    made = Made(Named(function, a=nn.Linear(8, 8)), 8)
    assert (made.residual(), made.activation()) == (None, Activation.NONE)
    assert made.others


def shortcut_of_a_changed_input(m, x):  # type: ignore[no-untyped-def]
    x = x.clone()
    y = m.a(x)
    x.relu_()
    return torch.relu(y + x)


def test_an_input_that_is_changed_after_the_layer_read_it() -> None:
    made = Made(Named(shortcut_of_a_changed_input, a=nn.Linear(8, 8)), 8)
    assert (made.count, made.residual(), made.activation()) == (1, None, Activation.NONE)


def norm_of_a_changed_input(m, x):  # type: ignore[no-untyped-def]
    x = x.clone()
    y = m.c(x)
    x.mul_(2)
    return m.n(y) + x.sum()


def test_an_input_that_is_changed_before_the_norm() -> None:
    made = Made(Named(norm_of_a_changed_input, c=nn.Conv2d(4, 4, 3), n=normed(4)), 4, 6, 7)
    assert made.count == 1 and "aten.batch_norm.default" in made.others


def test_both_ways_to_write_a_product() -> None:
    model = Named(
        lambda m, x: torch.addmm(m.bias, x @ m.right, m.left.t()) + torch.mm(x, m.right),
        right=nn.Parameter(torch.randn(8, 8)),
        left=nn.Parameter(torch.randn(8, 8)),
        bias=nn.Parameter(torch.randn(8)),
    )
    made = Made(model, 8)
    assert made.count == 3 and len(made.mine) == 3


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.addmm(m.bias, x, m.w, beta=2),
        lambda m, x: x @ x.t(),
        lambda m, x: x @ (m.w * x.mean()),
        lambda m, x: F.linear(x.double(), m.w.double()),
        lambda m, x: x + (m.w @ m.w)[0],  # torch computes it while it compiles
    ],
)
def test_products_that_are_not_a_layer_stay(function) -> None:  # type: ignore[no-untyped-def]
    made = Made(Named(function, w=nn.Parameter(torch.randn(8, 8)), bias=nn.Parameter(torch.randn(8))), 8)
    assert made.count == 0 and not made.mine


def test_weights_that_the_model_changes_stay() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.eye(8))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.w)
            self.w.mul_(1.0)
            return y

    assert Made(Changing(), 8, state=("w",)).count == 0


class Tied(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(words, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.emb(x).mean(1), self.emb.weight)


@pytest.mark.parametrize(("words", "said"), [(8192, 1), (1000, 0)])
def test_weights_that_are_stored_twice_are_noted(words: int, said: int) -> None:
    """2 MiB as the embedding has them, 2 MiB packed; a quarter of a mebibyte is not worth a line."""
    exported = torch.export.export(Tied(words), (torch.randint(0, words, (4, 3)),))
    notes: list[str] = []
    assert rewrite(exported.module(check_guards=False), (), note=notes.append) == 1
    assert len(notes) == said
    assert all("`emb.weight` is stored twice, for 2.1 MB more" in note and "--kernels torch" in note for note in notes)


def test_shared_weights_are_packed_once() -> None:
    made = Made(Named(lambda m, x: m.a(m.a(x)), a=nn.Linear(8, 8)), 8)
    assert made.count == 2
    assert [name for name, _ in made.module.named_buffers()] == ["a_weight_packed"]
    assert [name for name, _ in made.module.named_parameters()] == ["a.bias"]


def test_weights_that_something_else_uses_stay_too() -> None:
    made = Made(Named(lambda m, x: m.a(x) * m.a.weight.sum(), a=nn.Linear(8, 8)), 8)
    assert {name for name, _ in made.module.named_parameters()} == {"a.weight", "a.bias"}


def normed(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def test_a_residual_block_is_two_convolutions() -> None:
    model = Named(
        lambda m, x: F.relu(m.n2(m.c2(F.relu(m.n1(m.c1(x))))) + x),
        c1=nn.Conv2d(4, 4, 3, padding=1, bias=False),
        c2=nn.Conv2d(4, 4, 3, padding=1),
        n1=normed(4),
        n2=normed(4),
    )
    made = Made(model, 4, 6, 7)
    assert (made.count, made.others) == (2, [])
    assert str(made.residual(1)) == "x" and made.activation(1) is Activation.RELU


def test_a_batch_norm_without_weights() -> None:
    assert Made(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)), 4, 6, 7).others == []


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, (3, 1), stride=(2, 1), padding=(0, 2), dilation=(1, 3)),
        nn.Conv2d(4, 8, 3, groups=2),
        nn.Conv2d(4, 8, 3, groups=4, bias=False),
        nn.Conv2d(4, 6, 1),
        nn.Conv2d(4, 6, (3, 5), padding="same", dilation=(2, 1)),
        nn.Conv2d(4, 6, 3, padding="valid", stride=2),
    ],
    ids=str,
)
def test_convolutions(layer: nn.Module) -> None:
    assert Made(layer, 4, 9, 10).count == 1


@pytest.mark.parametrize("length", [5, 12])
def test_a_convolution_of_one_axis(length: int) -> None:
    made = Made(nn.Sequential(nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2), nn.BatchNorm1d(6)), 4, length)
    assert made.others == ["aten.unsqueeze.default", "aten.squeeze.dim"]


def test_what_follows_a_convolution_of_one_axis_is_part_of_it() -> None:
    made = Made(Named(lambda m, x: torch.tanh(m.c(x) + x), c=nn.Conv1d(4, 4, 3, padding="same")), 4, 9)
    assert (made.activation(), str(made.residual())) == (Activation.TANH, "unsqueeze_default_1")
    assert made.others == ["aten.unsqueeze.default", "aten.unsqueeze.default", "aten.squeeze.dim"]


@pytest.mark.parametrize(
    "layer",
    [
        nn.ConvTranspose2d(4, 6, 2, stride=2),
        nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1, bias=False),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
        nn.ConvTranspose2d(4, 6, (5, 3), stride=(2, 3), padding=(2, 1), output_padding=(1, 0)),
        nn.ConvTranspose2d(4, 6, 7, stride=3, padding=5),
        nn.ConvTranspose2d(4, 6, 3, padding=1),
        nn.ConvTranspose2d(4, 6, 1, stride=3),
        nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2),
        nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1, groups=4),
        nn.Sequential(nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1), normed(6), nn.ReLU()),
        nn.Sequential(nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(6, affine=False)),
    ],
    ids=str,
)
def test_transposed_convolutions(layer: nn.Module) -> None:
    made = Made(layer, 4, 9, 10)
    assert made.count == 1 and "aten.batch_norm.default" not in made.others


@pytest.mark.parametrize("padding", [0, 1])
def test_a_transposed_convolution_of_one_pixel_is_a_product(padding: int) -> None:
    made = Made(nn.ConvTranspose2d(4, 6, (4, 3), padding=padding), 4, 1, 1)
    assert (made.mine[0].args[4], made.mine[0].args[5]) == (72, [1, 1])


def test_a_view_of_what_a_transposed_convolution_gives() -> None:
    model = Named(lambda m, x: m.c(x).view(x.shape[0], -1), c=nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1))
    assert Made(model, 4, 5, 6).count == 1


def test_a_transposed_convolution_of_one_axis() -> None:
    assert Made(nn.Sequential(nn.ConvTranspose1d(4, 6, 5, 2, 2, 1), nn.ConvTranspose1d(6, 1, 4, 4)), 4, 9).count == 2


@pytest.mark.parametrize(
    "layer",
    [
        nn.ConvTranspose2d(4, 6, 3, dilation=2),
        nn.ConvTranspose2d(4, 6, 2, stride=2, output_padding=1),  # a pixel that no weight reaches
        nn.ConvTranspose2d(4, 6, 2, stride=2, padding=2),
    ],
    ids=str,
)
def test_transposed_convolutions_that_stay(layer: nn.Module) -> None:
    assert Made(layer, 4, 9, 10).count == 0


@pytest.mark.parametrize("convolve", [F.conv2d, F.conv_transpose2d])
def test_a_weight_of_convolutions_with_other_groups(convolve) -> None:  # type: ignore[no-untyped-def]
    """Packed for each: as groups, and as a whole."""
    wide = F.conv2d is convolve  # its weight counts the inputs of one group, the other's those of all

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return convolve(x, m.w).sum(1) + convolve(torch.cat([x, x], 1) if wide else x, m.w, groups=2).sum(1)

    assert Made(Named(forward, w=torch.randn(4, 4, 2, 2)), 4, 8, 10).count == 2


def test_a_weight_that_goes_both_ways() -> None:
    model = Named(lambda m, x: F.conv_transpose2d(F.conv2d(x, m.w, stride=2), m.w, stride=2), w=torch.randn(6, 4, 2, 2))
    assert Made(model, 4, 8, 10).count == 2


def test_padding_that_is_more_on_one_side_stays() -> None:
    assert Made(nn.Conv2d(4, 6, (3, 2), padding="same"), 4, 9, 10).count == 0


@pytest.mark.parametrize(("channels", "outputs", "groups", "joined"), [(12, 24, 12, 2), (9, 9, 9, 1), (20, 40, 4, 4)])
def test_groups_that_fill_a_vector_together(channels: int, outputs: int, groups: int, joined: int) -> None:
    """2 outputs each: 6 groups fit into 16; of 9 groups all; of 10 outputs each none."""
    made = Made(nn.Conv2d(channels, outputs, 3, groups=groups), channels, 5, 6)
    assert made.mine[0].args[9] == joined


def test_depthwise_groups_stay() -> None:
    assert Made(nn.Conv2d(16, 16, 3, groups=16), 16, 5, 6).mine[0].args[9] == 16


def test_a_layer_of_one_output_is_a_sum() -> None:
    """What follows is no part of it, for torch to fuse; the next layer is rewritten."""
    made = Made(nn.Sequential(nn.Linear(8, 1), nn.Sigmoid(), nn.Linear(1, 4, bias=False)), 3, 8)
    sum_of = ["aten.reshape.default", "aten.mul.Tensor", "aten.sum.dim_IntList", "aten.add.Tensor"]
    assert (made.count, made.others) == (2, [*sum_of, "aten.sigmoid.default"])
    assert Made(Named(lambda m, x: x @ m.w, w=torch.randn(8, 1)), 8).others == sum_of[:3]


def test_a_norm_of_the_batch_at_hand_stays() -> None:
    norm = nn.BatchNorm2d(6, track_running_stats=False)
    assert Made(nn.Sequential(nn.Conv2d(4, 6, 3), norm), 4, 6, 7).others == ["aten.batch_norm.default"]


def test_a_norm_in_training_stays() -> None:
    norm = normed(6)
    model = Named(
        lambda m, x: F.batch_norm(m.c(x), m.mean, m.var, training=True, momentum=0.0),
        c=nn.Conv2d(4, 6, 3),
        mean=norm.running_mean,
        var=norm.running_var,
    )
    assert Made(model, 4, 6, 7).others == ["aten.batch_norm.default"]


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda m, x: F.scaled_dot_product_attention(x, x, x), 1),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True), 1),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, x.new_ones(5, 5).tril().bool(), scale=0.5), 1),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, x[:, :1, :, :5]), 1),
        (lambda m, x: F.scaled_dot_product_attention(x[:, 0], x[:, 0], x[:, 0]), 0),  # three axes
        (lambda m, x: F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], enable_gqa=True), 0),
        (lambda m, x: F.scaled_dot_product_attention(x, x[:, :1], x[:, :1]), 0),  # heads are broadcast
        (lambda m, x: F.scaled_dot_product_attention(x, x, x[:, :1]), 0),
    ],
)
def test_attention(function, count: int) -> None:  # type: ignore[no-untyped-def]
    assert Made(Named(function), 2, 5, 8).count == count
