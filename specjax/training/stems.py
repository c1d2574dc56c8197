"""Beginnings of a user's turn, which an instruct target finishes in its own words.

A stem is an instruction, mostly followed by the first words of the passage or of the thing asked for; no stem ends in
a blank, because a tokenizer puts the blank in front of the next word. Left alone a target writes what it was tuned on
most, which is chat: that is the category `open`, whose stem is empty.
"""

import hashlib
import json

WEIGHTS = {"open": 35, "chat": 15, "code": 15, "summary": 12, "extraction": 12, "maths": 6, "rewriting": 5}

_PASSAGES = (
    "The", "In", "A", "Last", "When", "After", "Every", "Many", "Researchers", "Our", "On Monday", "For years",
    "The city", "The company", "A new", "It was", "She", "He had", "According to", "Scientists", "The history of",
    "During the", "Although", "My", "This year", "The old", "Most people", "Under the", "A team of", "The river",
)  # fmt: skip
_RECORDS = (
    "Dear", "Hi", "Name:", "From:", "On March", "The order", "Meeting notes:", "Invoice", "Our store", "Customer:",
    "Dr.", "The train", "Event:", "To:", "Product:", "The conference", "Please", "We", "Patient", "Flight", "Recipe:",
    "Ms.", "Job title:", "The museum", "John", "Maria", "In 1998", "The team", "Address:", "Thank you",
)  # fmt: skip

STEMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "open": (("",), ("",)),
    "chat": (
        (
            "What is", "What are", "How do I", "How can I", "How does", "Why do", "Why is", "Can you",
            "Could you explain", "Tell me about", "Give me", "I want to", "I need", "Write a short story about",
            "Write a letter to",
            "Write a poem about", "Explain", "Describe", "Compare", "List", "Suggest", "What should I", "Is it",
            "Help me", "Hello, I", "My friend", "Plan", "Which", "Who", "What would happen if",
            "In simple words, what is", "What is the best way to", "What is the difference between", "Why are",
            "Do you", "Where can I", "Give me three", "Write a dialogue between", "Tell me a joke about", "My", "I am",
            "How much",
        ),
        ("",),
    ),
    "code": (
        (
            "Write a Python function that", "Write a Python function `", "Write a function in JavaScript that",
            "Write a Python class", "Write a Python script that", "Write a SQL query that", "Write a bash script that",
            "Write a C function that", "Write a Java method that", "Write a Rust function that", "Implement",
            "Complete this function:\n\ndef", "Fix the bug in this code:\n\ndef", "Fix the bug in this code:\n\nfor",
            "Explain what this code does:\n\ndef", "Explain what this code does:\n\nimport",
            "What does this code print?\n\nx =", "Add comments to this code:\n\ndef",
            "Write unit tests for this function:\n\ndef", "Rewrite this loop as a list comprehension:\n\n",
            "How do I use", "Write HTML for",
            "In Python, how do I", "Write a regular expression that",
            "Translate this Python code to JavaScript:\n\ndef",
            "Add type hints to this function:\n\ndef", "Write a Python program to", "def", "class",
        ),
        ("",),
    ),
    "summary": (
        (
            "Summarize the following text:\n\n", "Summarize this paragraph in one sentence:\n\n",
            "Summarise the text below in two sentences.\n\n", "What is the main idea of this passage?\n\n",
            "Write a short summary of this article:\n\n", "Give a title to this text:\n\n", "TL;DR:\n\n",
            "Summarize this email in one line:\n\n", "List the key points of this text:\n\n",
            "Condense this into 30 words:\n\n", "Read the passage and say briefly what it is about.\n\nPassage:",
        ),
        _PASSAGES,
    ),
    "extraction": (
        (
            "Extract all names from this text:\n\n", "Extract the dates and places:\n\n",
            "List every person mentioned in the text below.\n\n", "Extract the key facts as bullet points:\n\n",
            "Extract the email addresses and phone numbers from this message:\n\n",
            "Turn this text into JSON with the keys name, date and place:\n\n",
            "From the text, find the price, the product and the customer.\n\nText:",
            "Answer the question from the text.\n\nText:", "What numbers appear in this text?\n\n",
            "Make a table of the items in this message:\n\n", "List the keywords of this text:\n\n",
            "Classify this review as positive or negative:\n\n", "Quote the sentence that says when:\n\n",
        ),
        _RECORDS,
    ),
    "maths": (
        (
            "A train", "A shop sells", "Tom has", "Anna buys", "A farmer", "There are", "If a", "A box holds",
            "Solve for x:", "What is the sum of", "Calculate", "Find the area of", "Simplify", "A recipe needs",
            "Three friends", "Explain how to compute", "What is 12", "Convert", "A car travels", "Prove that",
            "A class of", "The price of",
        ),
        ("",),
    ),
    "rewriting": (
        (
            "Rewrite this in a formal tone:\n\n", "Correct the grammar:\n\n", "Make this sentence shorter:\n\n",
            "Paraphrase:\n\n", "Fix the spelling mistakes in this text:\n\n", "Make this email more polite:\n\n",
            "Rewrite this text for a child:\n\n", "Turn these notes into a paragraph:\n\n",
            "Change to the past tense:\n\n",
        ),
        (*_PASSAGES, *_RECORDS),
    ),
}  # fmt: skip


def stem(seed: int, number: int) -> str:
    """The stem of dialogue `number`, drawn by the weights; the same for the same seed."""
    drawn = hashlib.sha256(f"stem {seed} {number}".encode()).digest()
    category, head, tail = (int.from_bytes(drawn[i : i + 8], "big") for i in (0, 8, 16))
    weighted = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
    heads, tails = STEMS[weighted[category % len(weighted)]]
    return heads[head % len(heads)] + tails[tail % len(tails)]


def version() -> str:
    """Changes when any stem or weight does."""
    return hashlib.sha256(json.dumps([WEIGHTS, STEMS]).encode()).hexdigest()[:12]
