"""Openings of user turns: what the target continues when it writes its own training text.

Two kinds, mixed at random: whole requests built from a template and a topic, and the first words of a
request that the target completes by itself. None is taken from a benchmark; ``train_drafter.py train``
also drops every text that shares a long run of tokens with an evaluation prompt.
"""

from __future__ import annotations

import random


def _choices(text: str, separator: str = "|") -> tuple[str, ...]:
    """The items of ``text``, one after another or on lines of their own."""
    return tuple(text.replace("\n", separator).split(separator))


SYSTEM_TURNS = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a helpful assistant.",
    "You are an expert programmer. Answer with working code.",
    "You are a patient teacher who explains every step.",
    "You are a careful mathematician. Think step by step.",
    "You are a creative writer.",
)
DEFAULT_SYSTEM_SHARE = 0.7
NO_SYSTEM_SHARE = 0.1

TOPICS = _choices(
    """photosynthesis|the water cycle|black holes|the French Revolution|supply and demand|machine learning|vaccines
the stock market|climate change|gravity|volcanoes|the human heart|electric cars|World War I|ancient Egypt|solar panels
inflation|the Roman Empire|neural networks|DNA|the immune system|plate tectonics|democracy|blockchain|jazz music|chess
the Renaissance|quantum computers|earthquakes|the solar system|bees and pollination|coffee|bread baking|yoga
meditation
time management|public speaking|job interviews|personal budgets|healthy breakfasts|learning a language|remote work
running a marathon|gardening on a balcony|houseplants|dog training|photography|travelling by train|camping
cooking pasta
writing a novel|the printing press|antibiotics|recycling|the internet|operating systems|databases|sorting algorithms
recursion|version control|encryption|web servers|probability|prime numbers|fractions|geometry|statistics|calculus
the Amazon rainforest|coral reefs|whales|penguins|dinosaurs|the moon landing|tides|rainbows|thunderstorms|deserts
Shakespeare|haiku|impressionist painting|architecture|film editing|board games|football|swimming|cycling|nutrition
sleep|stress|friendship|leadership|teamwork|negotiation|ethics in science|free will|happiness|education|libraries
small businesses|marketing|customer service|electric motors|bridges|airplanes|batteries|robots|3D printing
satellites"""
)

REQUESTS = (
    "What is {t}?",
    "Explain {t} in simple terms.",
    "Explain {t} to a ten-year-old.",
    "Write a short essay about {t}.",
    "Write a short story that involves {t}.",
    "Write a poem about {t}.",
    "Give me five facts about {t}.",
    "What are the advantages and disadvantages of {t}?",
    "How does one get started with {t}?",
    "What are common misconceptions about {t}?",
    "Summarize the history of {t} in one paragraph.",
    "Create a lesson plan about {t}.",
    "Write an email to a colleague about {t}.",
    "Compare {t} and {u}.",
    "How are {t} and {u} related?",
    "List three interesting questions about {t} and answer them.",
    "Write a dialogue between two friends who talk about {t}.",
    "Why does {t} matter today?",
    "Give me a step-by-step guide to {t}.",
    "Write a blog post about {t} with headings and bullet points.",
    "Draft a speech about {t}. Keep it under 200 words.",
    "Act as an expert on {t} and answer my questions.",
    "I have to give a talk on {t}. Can you outline it?",
    "Rewrite this sentence in a formal tone: I really like {t}.",
    "Pretend you are a journalist and report on {t}.",
)

CODE_REQUESTS = _choices(
    """Write a Python function that {c}.
Write a function in Python to solve this task: it {c}. Include a docstring.
Implement a function that {c}, with examples of its use.
How do I write JavaScript code that {c}?
Write a C++ program that {c}.
Can you show me code that {c} and explain how it works?"""
)
CODE_TASKS = _choices(
    """reverses a linked list|counts the vowels in a string|merges two sorted lists
checks whether a word is a palindrome
finds the largest value in a dictionary|removes duplicates from a list|computes the factorial of n|reads a CSV file
sums the digits of a number|rotates a matrix|sorts words by their length|finds the second smallest number in a list
converts Celsius to Fahrenheit|validates an email address|counts words in a text file|computes the mean and the median
generates the Fibonacci sequence|flattens a nested list|finds all anagrams in a list of words
tests if a number is prime
implements a stack|implements a queue with two stacks|searches a sorted array
groups a list of tuples by their first item
computes a running total|replaces every space by an underscore|splits a string at commas
finds common elements of two sets
returns the n-th triangular number|transposes a table|draws a histogram|calls a web API and parses the JSON
logs errors"""
)

NAMES = _choices(
    "Anna Ben Carla David Emma Frank Grace Henry Ivy Jack Karen Leo Mia Noah Olivia Paul Rosa Sam Tina Victor",
    " ",
)
THINGS = _choices(
    "apples books pencils cookies marbles stickers tickets eggs flowers coins boxes bottles cards shirts toys",
    " ",
)
MATH_OPENINGS = (
    "{n} has {i} {x}.",
    "{n} buys {i} {x} for ${j} each.",
    "{n} and {m} have {i} {x} together.",
    "A store sells {x} for ${j} each.",
    "A farmer has {i} {x}. Every day",
    "{n} earns ${i} an hour and works",
    "There are {i} students in a class.",
    "A train travels {i} miles in {j} hours.",
    "{n} reads {j} pages a day.",
    "{n} is {i} years old. {m} is",
    "If a box holds {i} {x}, how many",
    "{n} wants to save ${i} for",
    "It takes {n} {j} minutes to",
    "A baker makes {i} {x} and sells",
    "Calculate {i} * {j} +",
    "Solve for x: {j}x + {i} =",
    "A rectangle is {i} cm long and {j} cm wide.",
    "What is {i}% of",
)

CODE_OPENINGS = (
    "def {f}(",
    'def {f}({a}: int) -> int:\n    """',
    'def {f}({a}: str) -> str:\n    """',
    '\ndef {f}({a}):\n    """',
    "from typing import List\n\n\ndef {f}({a}: List[int]) -> ",
    "from typing import List\n\n\ndef {f}({a}: List[str]) -> ",
    "import math\n\n\ndef {f}({a}: float",
    "Complete the following function:\n\ndef {f}({a}",
    "class {c}:\n    def __init__(self",
    "```python\ndef {f}({a}",
    "What does this code do?\n\n",
    "Fix the bug in this code:\n\n",
)
FUNCTIONS = _choices(
    """count_items find_max remove_vowels is_valid total_price merge_words parse_date get_primes sort_by_key
mean_value reverse_words longest_run normalize split_pairs first_unique to_binary from_roman make_table compress
is_balanced sum_even rotate_left max_profit filter_names add_matrix digits_of string_length unique_chars""",
    " ",
)
ARGUMENTS = _choices("numbers text values n s words lst x items array a string data k arr", " ")
CLASSES = _choices("Stack Account Point Matrix Queue Student Inventory Timer Graph Vector", " ")

FIRST_WORDS = _choices(
    """What|What is the|What are|How|How do I|How can|How many|Why|Why do|When|Where|Who|Who was|Which
Can you|Could you
Please|Please write|Write|Write a|Give me|Tell me|Explain|Describe|Describe a|Compare|List|List the|Create|Create a
Design|Suggest|Imagine|Imagine you are|Suppose|Act as|You are|I am|I want|I need|I have|My|The|In|Given|Given a|Is it
Are there|Do you|Does|Should|Help me|Summarize|Rewrite|Translate|Edit|Identify|Analyze|Discuss|Classify
Extract|Provide
Generate|Develop|Propose|Recommend|Find|Solve|Prove|Calculate|Compute|Implement|A|An|If|For|One|Two|Let|This|Read the
Consider|Answer the following question:|Evaluate|Determine|Make|Name|Outline|Prepare|Convert|Correct|Hello|Hi
Thanks"""
)


class RequestSource:
    """Draws openings of user turns; the same seed gives the same sequence."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> tuple[str | None, str, bool]:
        """(system turn or None, user text, whether that text is a complete request)."""
        draw = self._random.random()
        system: str | None = SYSTEM_TURNS[0]
        if draw < NO_SYSTEM_SHARE:
            system = None
        elif draw > NO_SYSTEM_SHARE + DEFAULT_SYSTEM_SHARE:
            system = self._random.choice(SYSTEM_TURNS)
        kind = self._random.choices(
            ("request", "code request", "math", "code", "words", "free"), (28, 10, 20, 16, 20, 6)
        )[0]
        text, is_complete = self._user_turn(kind)
        return system, text, is_complete

    def _user_turn(self, kind: str) -> tuple[str, bool]:
        pick = self._random.choice
        if kind == "request":
            return pick(REQUESTS).format(t=pick(TOPICS), u=pick(TOPICS)), True
        if kind == "code request":
            return pick(CODE_REQUESTS).format(c=pick(CODE_TASKS)), True
        if kind == "math":
            number = self._random.randint
            return pick(MATH_OPENINGS).format(
                n=pick(NAMES), m=pick(NAMES), x=pick(THINGS), i=number(4, 90), j=number(2, 15)
            ), False
        if kind == "code":
            return pick(CODE_OPENINGS).format(
                f=pick(FUNCTIONS), a=pick(ARGUMENTS), c=pick(CLASSES)
            ), False
        return (pick(FIRST_WORDS) if kind == "words" else ""), False
