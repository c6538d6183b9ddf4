"""Output that has to match something: a JSON schema, a regular expression, one of some texts, a grammar.

The grammars and the token masks are llguidance's (https://github.com/guidance-ai/llguidance). Why this library and not xgrammar:
it is one binary wheel for all Python versions and without dependencies, where xgrammar 0.2.9 imports torch and needs transformers,
pydantic and its own FFI package; JSON schema, regular expressions and Lark grammars are one parser, so that they fail and end
alike; it names the schema keywords that it does not implement instead of ignoring them; and nothing is computed ahead for the
whole vocabulary: a mask walks the trie of the tokens as far as the grammar's state allows, within limits on work and memory.
The two were not timed against each other.

Measured on smollm2 (49,152 tokens, 2 CPU cores that others used too): 0.2 s once for the vocabulary; 1 ms to compile a schema
with nested objects, 0.2 s for a choice of 20,000 texts; 12 us a mask in the median and 0.2 ms in 99 of 100 cases while a batch of 8
fills in a schema; 2 us to take in a token. A step of that batch takes 50 ms and more, and the masks are computed while it runs.

What llguidance reads differently than the rest of the engine is settled here: a forced text is written in the tokens that spell it,
whatever the tokenizer would find in it (`matcher`), numbers and patterns of schemas that it would change are refused or made exact
(`schema_limits`), and what it takes long for is left behind in a thread of its own (`compiler`).
"""
