-- ARGV: id, token. A waiting entry counts as released already (a repeated command).
local entry = holding(ARGV[1], ARGV[2])
if not entry or state_of(entry) == 'p' then return 0 end
if state_of(entry) == 'c' then move(ARGV[1], entry, 'w', score_of(entry)) end
return 1
