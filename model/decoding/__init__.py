"""Reading one new token a row, fast: the same function as `Transformer.forward` with a cache, computed in other ways.

`ahead` asks the positional scheme about the next tokens at once, `weights` packs a model's matrices, `eager`,
`compiled` and `native` run a token through the blocks, and `choose` is the one place where one of them is picked.
`Transformer.forward` stays the definition: every way is tested against it, and it reads the prompts, but for those of
a few tokens.
"""
