"""GPT-Neo with fused attention and without a full table of logits.

Weights carry the names of Hugging Face's `GPTNeoForCausalLM`, so they load across in both
directions; `tests/lab/test_gpt_neo.py` proves the two equal. What differs is the work done:
attention runs in torch's fused kernels, and training never holds the logits of all tokens
(see linear_cross_entropy.py).
"""

from torch import Tensor, nn
from torch.nn.functional import gelu

from palsgd.lab.models.attention import causal_attention
from palsgd.lab.models.linear_cross_entropy import linear_cross_entropy

WINDOW = 256  # of the local layers, every second one


class GPTNeo(nn.Module):
    def __init__(
        self,
        *,
        vocab: int = 50257,
        positions: int = 300,
        hidden: int = 128,
        heads: int = 8,
        layers: int = 8,
    ):
        super().__init__()
        if hidden % heads:
            raise ValueError(f"hidden={hidden} must be a multiple of heads={heads}")
        self.transformer = Transformer(vocab, positions, hidden, heads, layers)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.apply(_initialize)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits; or, given targets, the mean cross-entropy over those that are not -100."""
        hidden = self.transformer(inputs)
        if targets is None:
            return self.lm_head(hidden)
        return linear_cross_entropy(
            hidden.flatten(0, 1), self.lm_head.weight, targets.flatten(), ignore=-100
        )


class Transformer(nn.Module):
    def __init__(self, vocab: int, positions: int, hidden: int, heads: int, layers: int):
        super().__init__()
        self.wte = nn.Embedding(vocab, hidden)
        self.wpe = nn.Embedding(positions, hidden)
        self.h = nn.ModuleList(Block(hidden, heads, local=i % 2 == 1) for i in range(layers))
        self.ln_f = nn.LayerNorm(hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        if length > self.wpe.num_embeddings:
            raise ValueError(
                f"inputs are {length} tokens long and the model has {self.wpe.num_embeddings} "
                "positions; shorten the inputs or build it with more positions"
            )
        x = self.wte(inputs) + self.wpe.weight[:length]
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, local: bool):
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        # one more level than needed, for the sake of the names
        self.attn = nn.ModuleDict({"attention": Attention(hidden, heads, local)})
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn["attention"](self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Attention(nn.Module):
    """Softmax of the plain products: GPT-Neo does not divide them by the root of the size."""

    def __init__(self, hidden: int, heads: int, local: bool):
        super().__init__()
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden, bias=False)
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.out_proj = nn.Linear(hidden, hidden)
        self._heads, self._local = heads, local

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self._heads, -1))
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        # a text that fits into one window needs no mask beyond the causal one
        window = WINDOW if self._local and x.shape[1] > WINDOW else 0
        mixed = causal_attention(q, k, v, window)
        return self.out_proj(mixed.flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.c_proj = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(gelu(self.c_fc(x), approximate="tanh"))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
