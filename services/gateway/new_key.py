"""`python -m services.gateway.new_key TENANT`: make an API key.

The key is printed once and kept nowhere; the second line goes into the keys file.
"""

import json
import sys

from services.gateway.tenants import new_key


def main(arguments: list[str]) -> int:
    """Print a new key and its entry for the keys file."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m services.gateway.new_key TENANT", file=sys.stderr)  # noqa: T201
        return 2
    key, stored = new_key()
    print(f"key (give it to the tenant, it is shown only now): {key}")  # noqa: T201
    entry = f"[tenants.{json.dumps(arguments[0])}]\nkeys = [{json.dumps(stored)}]"
    print(f"for the keys file:\n{entry}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
