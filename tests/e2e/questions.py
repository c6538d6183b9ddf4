"""What the end-to-end tests ask models that chat."""

CHAT_QUESTIONS = [
    "What is the capital of France?",
    "Explain to a child why the sky is blue.",
    "Write a haiku about autumn leaves.",
    "List three uses of a paper clip.",
    "Translate to Spanish: good morning, my friend.",
    "What is 17 times 23? Show your work.",
    "Who wrote the novel Frankenstein, and when?",
    "Give me a recipe for pancakes with four ingredients.",
    "What does the Python keyword `yield` do?",
    "Name the planets of the solar system in order.",
]
