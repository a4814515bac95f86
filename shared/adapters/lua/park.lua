-- ARGV: id, token, due time. A parked entry may be parked again (a repeated command).
local entry = holding(ARGV[1], ARGV[2])
if not entry or state_of(entry) == 'w' then return 0 end
move(ARGV[1], entry, 'p', ARGV[3])
return 1
