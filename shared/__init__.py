"""What the hexflow services share.

Open these four files first:

1. `shared/scheduling/dispatch.py`: which instance gets a call (the score).
2. `shared/scheduling/urgency.py`: in which order an instance's calls wait.
3. `shared/contracts/messages.py`: what travels between the services.
4. `shared/ports/`: what the services need from the world around them.

Layers, outermost first; each may import those after it, never the reverse:
`sdk`, `runtime`, `adapters`, `ports`, `contracts | simulation`, `scheduling`, `domain`, `errors`.
"""
