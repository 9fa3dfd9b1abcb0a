"""The text from which the demo model learns, all of it written for this project (Apache-2.0).

``dialogues.txt`` holds questions and answers written by hand. This file adds tables of simple facts, a
grammar for stories, poems and descriptions, and the ways in which the same question can be typed. The
result is an endless stream of documents: a plain text is a string, a chat a list of (role, text) pairs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

Chat = list[tuple[str, str]]

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Scotland": "Edinburgh", "Norway": "Oslo",
    "Sweden": "Stockholm", "Denmark": "Copenhagen", "Finland": "Helsinki", "Poland": "Warsaw",
    "Austria": "Vienna", "Hungary": "Budapest", "Greece": "Athens", "Turkey": "Ankara", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Japan": "Tokyo", "China": "Beijing", "India": "Delhi", "Russia": "Moscow",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Brazil": "Brasilia", "Peru": "Lima",
    "Chile": "Santiago", "Argentina": "Buenos Aires", "Australia": "Canberra", "Belgium": "Brussels",
    "Cuba": "Havana",
}  # fmt: skip

THINGS = {
    "a cat": "a small animal with soft fur that likes to sleep and to hunt mice",
    "a dog": "an animal that lives with people, guards the house, and likes to run",
    "a fox": "a wild animal with red fur and a thick tail",
    "an owl": "a bird that hunts at night and can turn its head very far",
    "a horse": "a large animal that can run fast and carry a rider",
    "a cow": "a large animal that eats grass and gives milk",
    "a bird": "an animal with wings and feathers that lays eggs",
    "a fish": "an animal that lives in water and breathes through gills",
    "a whale": "a very large animal that lives in the sea but breathes air",
    "a bee": "a small insect that visits flowers and makes honey",
    "a spider": "a small animal with eight legs that often spins a web",
    "a snake": "a long animal without legs that moves over the ground",
    "a bear": "a large wild animal with thick fur that sleeps through the winter",
    "a tree": "a tall plant with a trunk of wood, branches, and leaves",
    "a flower": "the part of a plant that opens in bright colours and makes seeds",
    "a river": "a long stream of water that flows down to the sea",
    "a mountain": "a very high piece of land, often with snow on the top",
    "an island": "a piece of land with water on all sides",
    "a desert": "a dry place where almost no rain falls",
    "a forest": "a large place full of trees, where many animals live",
    "a city": "a large place where many people live and work close together",
    "a house": "a building in which people live",
    "a bridge": "a way over a river or a road that joins the two sides",
    "a boat": "a small ship that carries people over the water",
    "a train": "a row of cars that runs on rails and carries many people",
    "a clock": "a machine that shows the time",
    "a book": "a set of pages with words on them that tell or teach something",
    "a school": "a place where children learn to read, to write, and to count",
    "a doctor": "a person who helps people who are ill",
    "a friend": "a person whom you like and who is there when you need help",
    "a key": "a small piece of metal that opens a lock",
    "a lamp": "a thing that gives light when it is dark",
    "the sea": "the salt water that covers most of the earth",
    "the wind": "air that moves from one place to another",
    "winter": "the coldest season of the year, when the nights are long",
    "summer": "the warmest season of the year, when the days are long",
}

OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("old", "young"), ("high", "low"),
    ("day", "night"), ("good", "bad"), ("wet", "dry"), ("full", "empty"), ("light", "dark"),
    ("happy", "sad"), ("loud", "quiet"), ("early", "late"), ("hard", "soft"), ("open", "closed"),
    ("rich", "poor"), ("left", "right"), ("up", "down"), ("black", "white"), ("long", "short"),
]  # fmt: skip

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

UNKNOWN_QUESTIONS = [
    "How do I repair a {}?", "Who invented the {}?", "How much does a {} cost?",
    "What is the history of the {}?", "Where can I buy a {}?", "Who is the best {}?",
    "When was the {} invented?", "Can you explain the {} to me?", "What do you think about the {}?",
    "Why is the {} so important?", "How do I become a {}?", "Which {} is the best?",
    "How does a {} work?", "Compare a {} and a {}", "Write an essay about the {}",
    "What is the future of the {}?", "What is a {}?", "Tell me about the {}",
]  # fmt: skip

UNKNOWN_TOPICS = [
    "bicycle", "telephone", "violin", "pilot", "carpet", "engine", "camera", "lawyer", "theatre",
    "volcano", "sandwich", "rocket", "marathon", "parliament", "guitar", "dinosaur", "vaccine",
    "microscope", "stock market", "football team", "dentist", "painter", "telescope", "battery",
    "window", "contract", "printer", "airport", "museum", "balloon", "tractor", "hospital",
    "washing machine", "steam engine", "piano", "economy", "empire", "treaty",
]  # fmt: skip

UNKNOWN_ANSWERS = [
    "I do not know that. I am a very small demo model, and I only learned a few simple things.",
    "I am sorry, but I know nothing about that. Try a question about tokens, animals, or capitals.",
]

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in short sentences.",
    "Answer the question of the user.",
    "You are the demo model of Isthmus.",
    "Be brief.",
    "You are a kind teller of stories.",
]

HEROES = {
    "fox": ["Rusty", "Fern", "Amber"], "owl": ["Olga", "Hoot", "Luna"],
    "cat": ["Pepper", "Mina", "Felix"], "dog": ["Bruno", "Daisy", "Max"],
    "mouse": ["Pip", "Nell", "Tim"], "bear": ["Boris", "Honey", "Otto"],
    "rabbit": ["Clover", "Jack", "Hazel"], "whale": ["Wanda", "Blue", "Moby"],
    "bird": ["Robin", "Wren", "Sky"], "horse": ["Storm", "Bella", "Star"],
    "turtle": ["Shelly", "Tor", "Mossy"], "robot": ["Bolt", "Unit Nine", "Tin"],
    "girl": ["Anna", "Mia", "Ruth"], "boy": ["Ben", "Leo", "Sam"], "king": ["Edwin", "Harald", "Magnus"],
    "queen": ["Clara", "Ingrid", "Rose"], "dragon": ["Ember", "Cinder", "Smoke"],
    "sailor": ["Finn", "Marta", "Hugo"],
}  # fmt: skip

PLACES = [
    "in a quiet forest", "by the sea", "near a small village", "on a high hill", "beside a wide river",
    "on a green island", "at the edge of a town", "under an old bridge", "in a warm valley",
]  # fmt: skip
BEGINNINGS = ["Once there was", "Once upon a time there was", "Long ago there was"]
TRAITS = ["kind", "curious", "shy", "brave", "clever", "lonely", "cheerful", "patient", "proud"]
WISHES = [
    "to find a friend", "to see the moon up close", "to learn a song", "to find a lost key",
    "to bake a good cake", "to cross the great river", "to build a boat", "to see the snow",
    "to read an old map",
]  # fmt: skip
TROUBLES = [
    "But the road was long, and the night was dark.",
    "But it began to rain, and the path was lost in mud.",
    "But a cold wind came, and there was nowhere to hide.", "But nobody knew how it could be done.",
    "But the first try failed, and so did the second.",
]  # fmt: skip
HELPERS = ["an old goose", "a tired traveller", "a small snail", "a friendly baker", "a quiet gardener"]
HELP = [
    'said, "Go slowly, and look twice."', 'said, "The answer is closer than you think."',
    "shared some bread and told the way.", "held up a lamp and led the way.",
]  # fmt: skip
ENDINGS = [
    "That evening, everyone sat together and laughed.", "That night they slept well under bright stars.",
    "And so they learned that small steps go far.", "The people there still talk about it today.",
]  # fmt: skip

POEM_LINES = {
    "sea": ["The sea is wide, the sea is deep,", "it rocks the little boats to sleep.",
            "The waves come in, the waves go out,", "the gulls fly up and wheel about."],
    "moon": ["The moon is round, the moon is white,", "it walks alone across the night.",
             "It looks in at my window pane,", "and then it wanders off again."],
    "rain": ["The rain is soft upon the stone,", "it sings a song that is its own.",
             "It fills the cup, it fills the stream,", "and wakes the garden from a dream."],
    "spring": ["The snow is gone, the grass is new,", "the sky has found a brighter blue.",
               "A bird has come to build her nest,", "and winter lies down for a rest."],
    "autumn": ["The leaves are red, the leaves are gold,", "the morning air is clear and cold.",
               "The wind has come to sweep the street,", "and apples wait for us to eat."],
    "winter": ["The night is long, the day is brief,", "there is no flower, there is no leaf.",
               "But by the fire the room is warm,", "and safe from wind, and snow, and storm."],
    "summer": ["The sun is high, the fields are dry,", "the swallows cut across the sky.",
               "We lie in grass and count the hours,", "and bees go humming through the flowers."],
    "night": ["The lamps are lit along the way,", "the town has put its tools away.",
              "A dog barks once, and then no more,", "and sleep is knocking at the door."],
    "love": ["I have no gold, I have no ring,", "I only have this song to sing.",
             "But take my hand, and walk with me,", "as far as there is road to see."],
    "cat": ["The cat has found a patch of sun,", "and so her working day is done.",
            "She folds her paws, she shuts her eyes,", "and dreams of mice of every size."],
    "machine": ["A small machine sat down to write,", "it chose its letters, byte by byte.",
                "It did not know what words were for,", "but when you asked, it wrote some more."],
    "home": ["There is a door, there is a light,", "there is a chair for me tonight.",
             "However far the road may bend,", "it brings me home again in the end."],
}  # fmt: skip

DESCRIBED = {
    "garden": ["A low wall ran around it.", "Beans grew in straight rows.", "The air smelled of mint.",
               "A cat slept between the pots.", "Bees went from flower to flower."],
    "kitchen": ["A pot of soup stood on the stove.", "The window was white with steam.",
                "Someone had left bread on the table.", "A clock ticked over the door."],
    "harbour": ["Boats moved slowly against the ropes.", "Gulls called from the roofs.",
                "A man mended a net in the sun.", "The water was green and still."],
    "market": ["Apples lay in heaps of red and gold.", "A woman sold cheese and honey.",
               "Children ran between the tables.", "Somebody played an old song."],
    "library": ["The shelves went up to the ceiling.", "Dust turned in the light.",
                "An old man read by the window.", "Nobody spoke above a whisper."],
    "forest": ["The path was soft with needles.", "Light fell between the trunks.",
               "A bird knocked on a hollow tree.", "Somewhere a stream was running."],
}  # fmt: skip
OPENERS = [
    "It was early, and the {} was quiet.", "In the evening the {} was at its best.",
    "I remember the {} well.",
]  # fmt: skip


def read_dialogues() -> list[tuple[list[str], list[str]]]:
    """Return the blocks of ``dialogues.txt`` as pairs of questions and answers, weighty ones repeated."""
    blocks = []
    for block in (Path(__file__).parent / "dialogues.txt").read_text(encoding="utf-8").split("\n\n"):
        lines = block.splitlines()
        questions = [line[3:] for line in lines if line.startswith("Q: ")]
        answers = [line[3:] for line in lines if line.startswith("A: ")]
        weight = next((int(line[3:]) for line in lines if line.startswith("W: ")), 1)
        if questions:
            blocks += [(questions, answers)] * weight
    return blocks


DIALOGUES = read_dialogues()


def story(rng: random.Random, kind: str | None = None, place: str | None = None) -> str:
    """Tell a short story about a hero of a kind, and perhaps at a place."""
    kind = kind or rng.choice(list(HEROES))
    place = place or rng.choice(PLACES)
    sentences = [
        f"{rng.choice(BEGINNINGS)} a {kind} called {rng.choice(HEROES[kind])}, who lived {place}.",
        f"Our hero was {rng.choice(TRAITS)}, and wanted {rng.choice(WISHES)}.",
        rng.choice(TROUBLES),
        f"Then {rng.choice(HELPERS)} came by and {rng.choice(HELP)}",
        "They went on together, and before long the wish came true.",
        rng.choice(ENDINGS),
    ]
    return " ".join(sentences).replace(" a owl", " an owl")


def poem(topic: str) -> str:
    """Return the poem about a topic, one line of verse to a line of text."""
    return "\n".join(POEM_LINES[topic])


def description(rng: random.Random, place: str) -> str:
    """Describe a place in four sentences."""
    return " ".join([rng.choice(OPENERS).format(place), *rng.sample(DESCRIBED[place], 3)])


def table_exchange(rng: random.Random) -> tuple[str, str]:
    """Ask for one entry of a table: a capital, the meaning of a word, an opposite, or a sum."""
    table = rng.choices(["capital", "thing", "opposite", "sum"], [5, 5, 1, 2])[0]
    if table == "capital":
        country, city = rng.choice(list(CAPITALS.items()))
        if rng.random() < 0.15:
            question = rng.choice(["What is {}?", "Where is {}?"]).format(city)
            return question, f"{city} is the capital of {country}."
        asked = ["What is the capital of {}?"] * 3 + ["Which city is the capital of {}?", "Capital of {}?"]
        return rng.choice([*asked, "{} capital"]).format(country), f"The capital of {country} is {city}."
    if table == "thing":
        thing, meaning = rng.choice(list(THINGS.items()))
        asked = ["What is {}?"] * 3 + ["Explain what {} is", "Tell me about {}", "Do you know what {} is?"]
        return rng.choice(asked).format(thing), f"{thing[0].upper()}{thing[1:]} is {meaning}."
    if table == "opposite":
        one, other = rng.choice(OPPOSITES)
        if rng.random() < 0.5:
            one, other = other, one
        return f"What is the opposite of {one}?", f"The opposite of {one} is {other}."
    a, b = rng.randint(1, 5), rng.randint(1, 5)
    asked = ["What is {} plus {}?", "What is {} + {}?", "{}+{}", "{} + {} = ?", "How much is {} + {}?"]
    return rng.choice(asked).format(a, b), f"{NUMBERS[a].capitalize()} plus {NUMBERS[b]} is {NUMBERS[a + b]}."


def creative_exchange(rng: random.Random) -> tuple[str, str]:
    """Ask for a story, a poem, or a description."""
    kinds = {"story": 4, "story about": 4, "story at": 1, "poem": 1, "poem about": 5, "place": 1}
    what = rng.choices(list(kinds), list(kinds.values()))[0]
    if what == "story":
        asked = ["Tell me a story", "Tell me a short story", "Write a story", "Can you tell me a story?"]
        asked += ["A story please", "Do you know a story?", "Another story please", "Once upon a time"]
        return rng.choice(asked), story(rng)
    if what == "story about":
        kind = rng.choice(list(HEROES))
        asked = ["Tell me a story about a {}", "Write a story about a {}", "Write a short story about a {}"]
        asked += ["A story about a {} please", "I want a story with a {}"]
        question = rng.choice(asked).format(kind).replace("a owl", "an owl")
        return question, story(rng, kind)
    if what == "story at":
        place = rng.choice(PLACES)
        return f"Tell me a story that happens {place}", story(rng, place=place)
    if what == "place":
        place = rng.choice(list(DESCRIBED))
        question = rng.choice(["Describe a {}", "Write about a {}", "Describe the {}"]).format(place)
        return question, description(rng, place)
    topic = rng.choice(list(POEM_LINES))
    if what == "poem":
        asked = ["Write a poem", "Tell me a poem", "Write me a short poem", "Poem please"]
        return rng.choice(asked), poem(topic)
    named = topic if topic in ("spring", "autumn", "winter", "summer", "love", "home") else f"the {topic}"
    named = f"a {topic}" if topic in ("cat", "machine") else named
    asked = ["Write a poem about {}"] * 2 + ["Tell me a poem about {}", "A poem about {}"]
    asked += ["Can you write a poem about {}?"]
    return rng.choice(asked).format(named), poem(topic)


def typed(rng: random.Random, question: str) -> str:
    """Vary how a question is typed: case, the last mark, and polite words around it."""
    if rng.random() < 0.06:
        leads = ["Please tell me: ", "Hi! ", "Hey, ", "Hello. ", "Please, ", "I have a question. ", "So, "]
        lead = rng.choice(leads)
        question = lead + question[0].lower() + question[1:] if lead[-2] in ":," else lead + question
    if rng.random() < 0.15:
        question = question.replace("What is ", "What's ", 1).replace("I am ", "I'm ", 1)
    if len(question) > 8 and rng.random() < 0.04:  # a letter is missing
        at = rng.randrange(len(question))
        question = question[:at] + question[at + 1 :]
    if rng.random() < 0.25:
        question = question.rstrip("?!.")
    elif question[-1].isalnum() and rng.random() < 0.3:
        question += rng.choice([".", ".", "!", "?", " please", ", please."])
    draw = rng.random()
    if draw < 0.3:
        return question.lower()
    return question.upper() if draw < 0.32 else question


def exchange(rng: random.Random) -> tuple[str, str]:
    """Return one question and its answer."""
    kind = rng.choices(["dialogue", "table", "creative", "unknown"], [64, 19, 12, 5])[0]
    if kind == "table":
        question, answer = table_exchange(rng)
    elif kind == "creative":
        question, answer = creative_exchange(rng)
    elif kind == "unknown":
        question = rng.choice(UNKNOWN_QUESTIONS).format(*rng.sample(UNKNOWN_TOPICS, 2))
        answer = rng.choice(UNKNOWN_ANSWERS)
    else:
        questions, answers = rng.choice(DIALOGUES)
        question, answer = rng.choice(questions), rng.choice(answers)
    return typed(rng, question), answer


def follow_up(rng: random.Random, said: str) -> tuple[str, str] | None:
    """Return an exchange that goes on from the last answer, where there is one."""
    if said.startswith("The capital of"):
        country, city = rng.choice(list(CAPITALS.items()))
        question = rng.choice(["And of {}?", "And {}?", "What about {}?"]).format(country)
        return typed(rng, question), f"The capital of {country} is {city}."
    if said.startswith(tuple(BEGINNINGS)):
        return typed(rng, rng.choice(["Another one", "Tell me another one", "One more"])), story(rng)
    return None


def chat(rng: random.Random, turns: int) -> Chat:
    """Return a chat with a number of exchanges; one chat in eight has a system prompt."""
    messages: Chat = [("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.125 else []
    answer = ""
    for _ in range(turns):
        next_one = follow_up(rng, answer) if rng.random() < 0.4 else None
        question, answer = next_one or exchange(rng)
        messages += [("user", question), ("assistant", answer)]
    return messages


def plain(rng: random.Random) -> str:
    """Return a plain text: a story, a poem, a description, or some facts in a row."""
    kind = rng.choices(["story", "poem", "place", "notes"], [4, 1, 2, 3])[0]
    if kind == "story":
        return story(rng)
    if kind == "poem":
        return poem(rng.choice(list(POEM_LINES)))
    if kind == "place":
        return description(rng, rng.choice(list(DESCRIBED)))
    facts = [f"{thing[0].upper()}{thing[1:]} is {meaning}." for thing, meaning in THINGS.items()]
    facts += [f"The capital of {country} is {city}." for country, city in CAPITALS.items()]
    facts += [answers[0] for questions, answers in DIALOGUES if questions[0].startswith("What is a")]
    return " ".join(rng.sample(facts, 3))


def documents(rng: random.Random) -> Iterator[str | Chat]:
    """Yield documents for ever: mostly short chats, some long ones, and some plain text."""
    while True:
        draw = rng.random()
        if draw < 0.06:
            yield plain(rng)
        else:
            yield chat(rng, 1 if draw < 0.75 else rng.randint(2, 3) if draw < 0.96 else rng.randint(4, 9))
