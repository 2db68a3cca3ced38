"""The words of generated sites: the same in all of them, so that what is learned on some is of use on others."""

from __future__ import annotations

SECTIONS = {
    "research": ["research", "science", "library", "knowledge", "observatory"],
    "news": ["news", "blog", "journal", "stories"],
    "shop": ["shop", "store", "products", "catalogue"],
    "people": ["people", "team", "staff", "authors"],
    "events": ["events", "calendar", "agenda"],
    "help": ["help", "support", "guides", "answers"],
    "photos": ["photos", "gallery", "media"],
    "projects": ["projects", "programmes", "initiatives"],
    "press": ["press", "announcements", "statements"],
}
"""What a section may be called, by its kind."""
DATA = ["data", "statistics", "figures", "indicators", "measurements"]
"""What the list of targets is called."""
RECORDS = ["series", "dataset", "table", "records"]
"""What a target is called."""
TOPICS = (
    "climate water energy soil traffic health housing forest ocean air trade schools farming crime".split()
)
SUBJECTS = "rainfall prices births harvest noise rivers wages output visitors storage density yields".split()
BESIDES = ["papers", "essays", "methods", "partners", "history", "glossary"]
"""What a topic holds besides its data."""
THINGS = "lamp chair kettle blanket basket mirror clock bottle carpet candle".split()
NAMES = "anna boris clara david elena felix greta hugo irene jonas karin lukas".split()
PHRASES = "a quiet morning|what we learned|looking back|an open letter|the long road|five questions|notes from the field".split(
    "|"
)
TEXT = (
    "The year began with a change that few had seen coming and many had hoped for. "
    "In the following months the work went on, slowly at first and then with more care. "
    "Those who took part remember the long evenings, the talks, and the many small steps."
)
