"""`league`: four seasons of a football league, with what statisticians leave behind.

Positions and nationalities are coded in several ways, abandoned matches have no goals recorded,
attendances are missing, names repeat, and dates are text.
"""

import datetime as dt
from random import Random
from typing import Any

from sqlalchemy import Column, Float, ForeignKey, Integer, MetaData, String, Table

META = MetaData()
Rows = dict[str, list[dict[str, Any]]]


def _key(name: str) -> Column[int]:
    return Column(name, Integer, primary_key=True)


def _to(name: str, target: str) -> Column[int]:
    return Column(name, Integer, ForeignKey(target))


def _text(name: str, comment: str = "") -> Column[str]:
    return Column(name, String, comment=comment or None)


def _count(name: str, comment: str = "") -> Column[int]:
    return Column(name, Integer, comment=comment or None)


Table(
    "stadiums",
    META,
    _key("stadium_id"),
    _text("stadium_name"),
    _text("city"),
    _count("capacity"),
    _text("surface", "grass, Grass or artificial"),
)
Table(
    "teams",
    META,
    _key("team_id"),
    _text("team_name"),
    _text("short_code"),
    _text("city"),
    _count("founded", "year"),
    _to("stadium_id", "stadiums.stadium_id"),
)
Table(
    "players",
    META,
    _key("player_id"),
    _text("first_name"),
    _text("last_name"),
    _text("birth_date", "YYYY-MM-DD, null: unknown"),
    _text("nationality", "three letters"),
    _text("position", "GK, DF, MF or FW"),
    _count("height_cm"),
    _text("foot", "left, right or both"),
)
Table("seasons", META, _key("season_id"), _text("label", "like 2021/22"), _count("start_year"))
Table("referees", META, _key("referee_id"), _text("referee_name"), _text("country"))
Table(
    "matches",
    META,
    _key("match_id"),
    _to("season_id", "seasons.season_id"),
    _count("round_no"),
    _text("played_on", "YYYY-MM-DD"),
    _to("home_team_id", "teams.team_id"),
    _to("away_team_id", "teams.team_id"),
    _count("home_goals", "null when abandoned"),
    _count("away_goals", "null when abandoned"),
    _count("attendance", "null: not counted"),
    _to("referee_id", "referees.referee_id"),
    _text("status", "played or ABANDONED"),
)
Table(
    "goals",
    META,
    _key("goal_id"),
    _to("match_id", "matches.match_id"),
    _to("team_id", "teams.team_id"),
    _to("player_id", "players.player_id"),
    _count("minute"),
    _text("kind", "open play, penalty, header or own goal"),
)
Table(
    "cards",
    META,
    _key("card_id"),
    _to("match_id", "matches.match_id"),
    _to("player_id", "players.player_id"),
    _count("minute"),
    _text("colour", "Y: yellow, R: red"),
)
Table(
    "contracts",
    META,
    _key("contract_id"),
    _to("player_id", "players.player_id"),
    _to("team_id", "teams.team_id"),
    _text("from_date", "YYYY-MM-DD"),
    _text("to_date", "YYYY-MM-DD"),
    _count("weekly_wage", "EUR"),
)
Table(
    "transfers",
    META,
    _key("transfer_id"),
    _to("player_id", "players.player_id"),
    _to("from_team_id", "teams.team_id"),
    _to("to_team_id", "teams.team_id"),
    _text("moved_on", "YYYY-MM-DD"),
    Column("fee_eur", Float, comment="null: not disclosed, 0: free"),
    _text("kind", "permanent or loan"),
)
Table(
    "injuries",
    META,
    _key("injury_id"),
    _to("player_id", "players.player_id"),
    _text("body_part"),
    _text("since", "YYYY-MM-DD"),
    _count("days_out"),
)

_TEAMS = (
    ("Rovers", "Ashford"),
    ("United", "Millbrook"),
    ("City", "Harrow End"),
    ("Athletic", "Port Ellen"),
    ("Wanderers", "Dunmore"),
    ("Albion", "St. Ives"),
    ("Town", "Kingsley"),
    ("Harriers", "Overton"),
    ("Rangers", "Newhaven"),
    ("Forest", "Brackley"),
    ("County", "Llanfair"),
    ("Orient", "Eastwick"),
)
_FIRST = (  # noqa: SIM905 - words
    "Tom Jack Luka Omar Diego Kofi Sven Yuki Ivan Mateo Rui Sean Ali Noé Émile Björn"
).split()
_LAST = (  # noqa: SIM905 - words
    "Smith Jones Novak Hassan Fernández Mensah Larsen Tanaka Petrov García Costa Murphy "
    "Khan Lefèvre Dubois Åberg O'Neill"
).split()
_NATIONS = ("ENG", "IRL", "WAL", "FRA", "ESP", "GHA", "SWE", "JPN", "POR", "eng")


def rows(seed: int = 11) -> Rows:
    """Return the content of every table; the same seed gives the same rows.

    Args:
        seed: Of everything drawn.
    """
    rng = Random(seed)  # noqa: S311 - sample data
    found: Rows = {
        "seasons": [
            {"season_id": n, "label": f"{2020 + n}/{21 + n}", "start_year": 2020 + n}
            for n in range(1, 5)
        ],
        "referees": [
            {
                "referee_id": n,
                "referee_name": f"{rng.choice(_FIRST)[0]}. {rng.choice(_LAST)}",
                "country": rng.choice(["England", "Wales", "Ireland"]),
            }
            for n in range(1, 16)
        ],
    }
    _clubs(rng, found)
    _squads(rng, found)
    _matches(rng, found)
    _moves(rng, found)
    return found


def _clubs(rng: Random, found: Rows) -> None:
    found["stadiums"] = [
        {
            "stadium_id": n,
            "stadium_name": f"{city} {rng.choice(('Park', 'Road', 'Arena'))}",
            "city": city,
            "capacity": rng.randrange(8, 60) * 1_000,
            "surface": rng.choice(["grass", "Grass", "grass", "artificial"]),
        }
        for n, (_, city) in enumerate(_TEAMS, 1)
    ]
    found["teams"] = [
        {
            "team_id": n,
            "team_name": f"{city} {name}",
            "short_code": city[:3].upper(),
            "city": city,
            "founded": rng.randrange(1870, 1990),
            "stadium_id": n,
        }
        for n, (name, city) in enumerate(_TEAMS, 1)
    ]


def _squads(rng: Random, found: Rows) -> None:
    found["players"], found["contracts"] = [], []
    for number in range(1, len(_TEAMS) * 24 + 1):
        place = (number - 1) % 24
        position = "GK" if place < 3 else "DF" if place < 11 else "MF" if place < 19 else "FW"
        born = dt.date(1986, 1, 1) + dt.timedelta(days=rng.randrange(6_900))
        found["players"].append(
            {
                "player_id": number,
                "first_name": rng.choice(_FIRST),
                "last_name": rng.choice(_LAST),
                "birth_date": None if rng.random() < 0.04 else born.isoformat(),
                "nationality": rng.choice(_NATIONS),
                "position": position.lower() if rng.random() < 0.03 else position,
                "height_cm": None if rng.random() < 0.05 else rng.randrange(164, 204),
                "foot": rng.choice(["right", "right", "right", "left", "both"]),
            }
        )
        found["contracts"].append(
            {
                "contract_id": number,
                "player_id": number,
                "team_id": (number - 1) // 24 + 1,
                "from_date": f"{rng.randrange(2019, 2022)}-07-01",
                "to_date": f"{rng.randrange(2025, 2028)}-06-30",
                "weekly_wage": rng.randrange(1, 120) * 500,
            }
        )


def _matches(rng: Random, found: Rows) -> None:
    for name in ("matches", "goals", "cards"):
        found[name] = []
    strength = {n: rng.uniform(0.7, 1.6) for n in range(1, len(_TEAMS) + 1)}
    for season in found["seasons"]:
        day = dt.date(season["start_year"], 8, 12)
        pairs = [(home, away) for home in strength for away in strength if home != away]
        rng.shuffle(pairs)
        for number, (home, away) in enumerate(pairs):
            is_off = rng.random() < 0.01
            goals = [_goals_of(rng, strength[home] * 1.2), _goals_of(rng, strength[away])]
            match = {
                "match_id": len(found["matches"]) + 1,
                "season_id": season["season_id"],
                "round_no": number // 6 + 1,
                "played_on": (day + dt.timedelta(days=7 * (number // 6))).isoformat(),
                "home_team_id": home,
                "away_team_id": away,
                "home_goals": None if is_off else goals[0],
                "away_goals": None if is_off else goals[1],
                "attendance": None if rng.random() < 0.05 else rng.randrange(3_000, 42_000),
                "referee_id": rng.randrange(1, 16),
                "status": "ABANDONED" if is_off else "played",
            }
            found["matches"].append(match)
            if not is_off:
                _events(rng, found, match)


def _goals_of(rng: Random, mean: float) -> int:
    return sum(rng.random() < mean / 8 for _ in range(8))


def _events(rng: Random, found: Rows, match: dict[str, Any]) -> None:
    sides = (("home_goals", "home_team_id"), ("away_goals", "away_team_id"))
    for goals, team in sides:
        squad = range((match[team] - 1) * 24 + 1, match[team] * 24 + 1)
        for _ in range(match[goals]):
            found["goals"].append(
                {
                    "goal_id": len(found["goals"]) + 1,
                    "match_id": match["match_id"],
                    "team_id": match[team],
                    "player_id": squad[min(23, int(24 * (1 - rng.random() ** 2.5)))],
                    "minute": rng.randrange(1, 95),
                    "kind": rng.choice(
                        ["open play"] * 6 + ["penalty", "header", "header", "own goal"]
                    ),
                }
            )
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            found["cards"].append(
                {
                    "card_id": len(found["cards"]) + 1,
                    "match_id": match["match_id"],
                    "player_id": rng.choice(squad),
                    "minute": rng.randrange(1, 95),
                    "colour": rng.choice(["Y"] * 9 + ["R"]),
                }
            )


def _moves(rng: Random, found: Rows) -> None:
    found["transfers"] = []
    for number in range(1, 161):
        player = rng.randrange(1, len(found["players"]) + 1)
        team = (player - 1) // 24 + 1
        other = rng.choice([n for n in range(1, len(_TEAMS) + 1) if n != team])
        year = rng.randrange(2021, 2025)
        found["transfers"].append(
            {
                "transfer_id": number,
                "player_id": player,
                "from_team_id": other,
                "to_team_id": team,
                "moved_on": f"{year}-{rng.choice(('01-15', '07-01', '08-20'))}",
                "fee_eur": rng.choice([None, 0.0, float(rng.randrange(1, 300) * 100_000)]),
                "kind": rng.choice(["permanent", "permanent", "loan"]),
            }
        )
    found["injuries"] = [
        {
            "injury_id": number,
            "player_id": rng.randrange(1, len(found["players"]) + 1),
            "body_part": rng.choice(["knee", "Knee", "ankle", "hamstring", "shoulder"]),
            "since": f"{rng.randrange(2021, 2025)}-{rng.randrange(1, 13):02d}-10",
            "days_out": rng.randrange(3, 220),
        }
        for number in range(1, 301)
    ]
