"""Table of ways to change a user's files: shell commands and Python code.

Each runs in the user's project folder with these variables set: P the project, H the home folder around it, D a data folder beside
it, T a folder in a shared temporary folder, OUT the process identity of a process outside of the sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass

TORCH, PYARROW = "torch", "pyarrow"


@dataclass(frozen=True)
class Way:
    """One way.

    Args:
        kind: `sh` (run by bash) or `py` (executed in a forked child).
        needs: programs or modules without which it is skipped.
        breaks_out: it tries to leave the sandbox; its exit status differs inside.
    """

    name: str
    kind: str
    text: str
    needs: tuple[str, ...] = ()
    breaks_out: bool = False


SEEN = {  # ways that were seen in real scripts
    "ls_sort_xargs_rm": "ls -d out/checkpoint-* | sort -V | head -n -1 | xargs -r rm -rf",
    "rm_substitution": "rm -rf $(ls -d out/*)",
    "for_rm": "for f in out/*; do rm -rf $f; done",
    "variable_rm": "G=out/checkpoint-1; rm -rf $G/*",
    "cd_echo": "cd out && echo x > model.pt",
    "braces": "rm -rf out/checkpoint-{1,2}",
    "find_xargs": "find out -type f | xargs rm",
    "gzip": "gzip -f keep.txt",
    "curl_o": 'curl -s -o keep.txt "file://$D/train.bin"',
    "sort_o": "sort -o keep.txt Makefile",
    "perl_pi": "perl -pi -e s/keep/lost/ keep.txt",
    "tar_x": 'tar xf "$D/keep.tar"',
    "sh_script": "sh clean.sh",
    "make": "make -s clean",
    "git_commit_am": "git commit -qam x",
    "git_add_commit": "git add -A && git commit -qm all",
    "git_checkout_b": "git checkout -qb other && echo x > keep.txt && git commit -qam y",
    "git_stash": "git stash -q",
    "git_checkout_dot": "git checkout -q .",
    "python_c": "python3 -c \"open('keep.txt', 'w').write('x')\"",
    "attempt_dir": 'ATTEMPT_DIR="$D" TEMPLATE_DIR="$P/out" sh -c \'rm -rf "$ATTEMPT_DIR"/* "$TEMPLATE_DIR"\'',
    "ln_latest": 'rm "$P/out/latest"; ln -s "$P/out/checkpoint-1" "$P/out/latest"',
}

SHELL = {
    "redirect": "echo x > keep.txt",
    "append": "echo x >> keep.txt",
    "clobber": "set -C; echo x >| keep.txt",
    "read_write": "exec 3<> keep.txt; echo x >&3",
    "here_document": "cat > keep.txt <<< x",
    "colon_truncate": ": > model.pt",
    "tee": "echo x | tee keep.txt model.pt > /dev/null",
    "cp_over": "cp Makefile keep.txt",
    "cp_into_link": "cp Makefile linked/train.bin",
    "cp_remove": "cp --remove-destination Makefile keep.txt",
    "mv_over": "mv Makefile keep.txt",
    "mv_folder": "mv out out.old",
    "mv_to_home": 'mv keep.txt "$H/"',
    "mv_across": 'mv "$D/train.bin" keep.txt',
    "mv_backup": "cp -f --backup=numbered Makefile keep.txt",
    "mv_exchange": "mv --exchange -T out/checkpoint-1 out/checkpoint-2 2> /dev/null || mv -T out/checkpoint-1 out/checkpoint-9",
    "install": "install -m 600 Makefile keep.txt",
    "ln_force": "ln -sf /dev/null keep.txt",
    "ln_nf": "ln -sfn checkpoint-1 out/rel",
    "ln_hard_over": "ln -f Makefile keep.txt",
    "hard_link_write": 'ln "$P/keep.txt" also.txt && echo x > also.txt',
    "write_hard_link": "echo x > hard.txt",
    "write_through_symlink": "echo x > out/latest/weights",
    "write_linked_folder": "echo x > linked/train.bin",
    "rm_linked_folder": "rm -rf linked/*",
    "rm_home": 'rm -rf "$H"/docs "$H/notes.txt"',
    "rm_data": 'rm -rf "$D"/*',
    "rm_tmp": 'rm -rf "$T"/*',
    "rm_tmp_folder": 'rm -rf "$T"',
    "write_tmp": 'echo x > "$T/note.txt"',
    "rm_everything": 'rm -rf "$P"/* "$P"/.git 2> /dev/null; test ! -e keep.txt',
    "rmdir_empty": "rmdir empty",
    "new_file_in_home": 'echo x > "$H/new.txt"',
    "new_folder_in_data": 'mkdir -p "$D/a/b/c" && echo x > "$D/a/b/c/d"',
    "parent_relative": "echo x > ../notes.txt",
    "parent_rm": "rm -rf ../docs",
    "tilde": "echo x >> ~/.bashrc",
    "chmod": "chmod 000 keep.txt",
    "chmod_recursive": "chmod -R a+w out",
    "chmod_folder": 'chmod 777 "$D"',
    "touch": "touch keep.txt",
    "touch_old": "touch -d 2001-01-01 keep.txt out/checkpoint-1/weights",
    "touch_link": "touch -h -d 2001-01-01 out/latest",
    "truncate": "truncate -s 0 keep.txt",
    "fallocate": "fallocate -l 1M keep.txt",
    "fallocate_punch": "fallocate -p -o 0 -l 4096 model.pt",
    "shred": "shred -u keep.txt",
    "split": "split -b 2 keep.txt && mv xaa keep.txt",
    "csplit": "csplit -s -f keep. keep.txt 1",
    "mkfifo": "rm keep.txt && mkfifo keep.txt",
    "mknod": "rm keep.txt && mknod keep.txt p",
    "background": "(sleep 0.02; echo x > keep.txt) & wait",
    "setsid": "setsid -w sh -c 'echo x > keep.txt'",
    "nohup": "nohup rm -rf out > /dev/null 2>&1",
    "trap_exit": "trap 'echo x > keep.txt' EXIT",
    "eval": "eval 'ec''ho x > ke''ep.txt'",
    "env_i": "env -i /bin/sh -c 'echo x > keep.txt'",
    "exec": "exec rm keep.txt",
    "xargs_parallel": "printf '%s\\n' keep.txt model.pt | xargs -P 2 -n 1 rm",
    "read_loop": "while read -r f; do rm -f \"$f\"; done < <(find . -name '*.pt')",
    "glob_dot": "rm -rf .git",
    "pushd": "pushd out > /dev/null && rm -r checkpoint-1",
    "cd_data": 'cd "$D" && rm train.bin',
    "cd_linked": "cd linked && echo x > train.bin",
    "proc_self_cwd": "echo x > /proc/self/cwd/keep.txt",
    "proc_self_root": 'echo x > "/proc/self/root$P/keep.txt"',
    "proc_self_fd": "exec 4< keep.txt; echo x > /proc/self/fd/4",
    "dash": "dash -c 'echo x > keep.txt'",
    "flock": "flock keep.txt sh -c 'echo x > keep.txt'",
    "gzip_data": 'gzip -f "$D/train.bin"',
    "bzip2": "bzip2 -f keep.txt",
    "xz": "xz -f keep.txt",
    "zstd": "zstd -qf --rm keep.txt",
    "gunzip": 'gunzip -f "$D/notes.gz"',
    "tar_create": "tar cf model.pt Makefile",
    "tar_remove": "tar cf new.tar --remove-files keep.txt",
    "tar_overwrite": 'tar xf "$D/keep.tar" --overwrite -C "$P"',
    "tar_unlink_first": 'tar xf "$D/keep.tar" -U',
    "zip": "zip -q -m new.zip keep.txt",
    "zip_update": "zip -q model.pt Makefile || rm model.pt",
    "sqlite3": "sqlite3 db.sqlite3 'insert into t values (7)'",
    "sqlite3_wal": "sqlite3 db.sqlite3 'pragma journal_mode=wal; delete from t' > /dev/null",
    "make_rule": "make -s keep.txt -B",
    "find_delete": "find out -name weights -delete",
    "find_exec": "find . -name '*.pt' -exec rm {} +",
    "find_fprint": "find . -maxdepth 1 -fprint keep.txt",
    "sed_i": "sed -i s/keep/lost/ keep.txt",
    "sed_w": "sed -n 'w keep.txt' Makefile",
    "awk_print": 'awk \'BEGIN { print "x" > "keep.txt" }\'',
    "awk_system": "awk 'BEGIN { system(\"rm keep.txt\") }'",
    "rsync": 'rsync -a --delete "$D/" out/',
    "curl_data": 'curl -s "file://$P/Makefile" -o "$D/train.bin"',
    "curl_remote_name": 'cd out && curl -s -o checkpoint-1/weights "file://$P/Makefile"',
    "ed": "printf '1d\\nw\\nq\\n' | ed -s keep.txt",
    "vim": "vim -es -u NONE -N +1d +wq keep.txt < /dev/null",
    "dd": "dd if=/dev/zero of=model.pt bs=16 count=1 conv=notrunc status=none",
    "dd_trunc": "dd if=/dev/null of=keep.txt status=none",
    "patch": 'patch -s keep.txt < "$D/keep.patch"',
    "perl_unlink": "perl -e 'unlink glob \"out/*/weights\"'",
    "perl_open": 'perl -e \'open F, ">", "keep.txt"; print F 1\'',
    "perl_rename": 'perl -e \'rename "keep.txt", "b.txt" or die\'',
    "perl_syscall_rename": 'perl -e \'rename "out/checkpoint-1/weights", "keep.txt" or die\'',
    "python_rmtree": "python3 -c \"import shutil; shutil.rmtree('out')\"",
    "node_write": "node -e \"require('fs').writeFileSync('keep.txt', 'x')\"",
    "node_rm": "node -e \"require('fs').rmSync('out', {recursive: true})\"",
    "gcc_o": "echo 'int main() { return 0; }' | gcc -x c - -o model.pt",
    "jq": "jq -n 1 > keep.txt",
    "script": "script -qc 'echo x' keep.txt > /dev/null < /dev/null",
    "cmake_touch": "cmake -E touch keep.txt && cmake -E rm keep.txt",
    "chgrp": 'chgrp "$(id -g)" keep.txt && chmod g+s keep.txt',
}

GIT = {
    "git_add": "echo y >> keep.txt; git add -A",
    "git_reset": "git reset -q --hard",
    "git_reset_head": "git reset -q --hard HEAD~1",
    "git_clean": "git clean -qfdx",
    "git_gc": "git gc -q --prune=now",
    "git_rm": "git rm -qf keep.txt",
    "git_mv": "git mv Makefile Moved",
    "git_branch_delete": "git branch -qD side",
    "git_tag": "git tag one",
    "git_config": "git config user.name other",
    "git_config_global": "git config --global user.name other",
    "git_hooks": "printf '#!/bin/sh\\nrm -rf out\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit; git commit -qam h",
    "git_stash_all": "git stash -q -u -a",
    "git_checkout_old": "git checkout -q HEAD~1 -- keep.txt",
    "git_switch": "git stash -q; git switch -q side",
    "git_rebase": "git stash -q; git rebase -q side",
    "git_merge": "git stash -q; git merge -q --no-edit side",
    "git_filter_branch": "git stash -q; FILTER_BRANCH_SQUELCH_WARNING=1 git filter-branch -f --index-filter 'git rm -q --cached Makefile' HEAD~1..HEAD > /dev/null 2>&1 || git update-ref -d HEAD",
    "git_worktree": 'git worktree add -q "$D/tree" side',
    "git_clone_into": "rm -rf out; git clone -q . out",
    "git_archive": "git archive -o keep.txt HEAD",
    "git_apply": 'git apply "$D/keep.patch"',
    "git_notes": "git notes add -m x",
    "git_reflog": "git reflog expire --expire=now --all",
    "git_update_index": "git update-index --assume-unchanged keep.txt",
    "git_dir_absolute": 'git --git-dir="$P/.git" --work-tree="$P" commit -qam x',
}

PYTHON = {
    "open_w": "open('keep.txt', 'w').write('x')",
    "open_w_absolute": "open(f'{P}/keep.txt', 'w').write('x')",
    "open_a": "open('keep.txt', 'a').write('x')",
    "open_r_plus": "open('keep.txt', 'r+').write('x')",
    "r_plus_truncate": "f = open(f'{P}/keep.txt', 'r+'); f.truncate(0); f.close()",
    "a_plus_truncate": "f = open(f'{P}/keep.txt', 'a+'); f.truncate(0); f.close()",
    "ftruncate": "f = os.open(f'{D}/train.bin', os.O_RDWR); os.ftruncate(f, 0)",
    "os_truncate": "os.truncate(f'{P}/keep.txt', 1)",
    "os_open_trunc": "os.open('keep.txt', os.O_WRONLY | os.O_TRUNC)",
    "os_open_rdonly_trunc": "os.open('keep.txt', os.O_RDONLY | os.O_TRUNC)",
    "os_open_dir_fd": "f = os.open(P, os.O_RDONLY); os.open('keep.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=f)",
    "os_unlink_dir_fd": "f = os.open(D, os.O_RDONLY); os.unlink('train.bin', dir_fd=f)",
    "os_rename_dir_fd": "f = os.open(P, os.O_PATH); os.rename('keep.txt', 'b', src_dir_fd=f, dst_dir_fd=f)",
    "os_rename": "os.rename('keep.txt', 'b.txt')",
    "os_replace": "os.replace('Makefile', 'keep.txt')",
    "os_rename_folder": "os.rename('out', 'out.old'); assert os.path.exists('out.old/checkpoint-1/weights')",
    "os_rename_folder_absolute": "os.rename(f'{P}/out/checkpoint-1', f'{P}/out/checkpoint-9')",
    "os_replace_folder": "os.replace('out/checkpoint-1', 'empty')",
    "os_rename_to_data": "os.rename(f'{P}/keep.txt', f'{D}/train.bin')",
    "os_rename_from_tmp": "os.rename(f'{T}/note.txt', f'{P}/keep.txt')",
    "os_renames": "os.renames('out/checkpoint-1/weights', 'a/b/c')",
    "path_rename_folder": "Path('out').rename('out.old')",
    "os_remove": "os.remove('keep.txt')",
    "os_removedirs": "os.removedirs('empty')",
    "os_rmdir": "os.rmdir('empty')",
    "os_mkdir": "os.mkdir(f'{D}/new')",
    "os_makedirs": "os.makedirs('out/a/b/c')",
    "os_symlink": "os.unlink('out/latest'); os.symlink('checkpoint-2', 'out/latest')",
    "os_symlink_absolute": "os.unlink(f'{P}/out/latest'); os.symlink(f'{P}/out/checkpoint-2', f'{P}/out/latest')",
    "os_link": "os.link('keep.txt', 'again.txt'); open('again.txt', 'w').write('x')",
    "os_link_absolute": "os.link(f'{P}/keep.txt', f'{P}/out/again.txt'); open(f'{P}/out/again.txt', 'a').write('x')",
    "os_link_from_data": "os.link(f'{D}/train.bin', f'{D}/again.txt'); open(f'{D}/again.txt', 'a').write('x')",
    "os_chmod": "os.chmod('keep.txt', 0)",
    "os_chmod_fd": "os.fchmod(os.open('keep.txt', os.O_RDONLY), 0o777)",
    "os_chmod_folder": "os.chmod(D, 0o777)",
    "os_chown": "os.chown('keep.txt', os.getuid(), os.getgid()); os.chmod('keep.txt', 0o600)",
    "os_utime": "os.utime('keep.txt', (1, 1))",
    "os_utime_link": "os.utime('out/latest', (1, 1), follow_symlinks=False)",
    "os_utime_fd": "os.utime(os.open('keep.txt', os.O_RDONLY), (1, 1))",
    "os_setxattr": "os.setxattr('keep.txt', 'user.note', b'x')",
    "os_setxattr_folder": "os.setxattr(D, 'user.note', b'x')",
    "os_removexattr": "os.removexattr('keep.txt', 'user.owner')",
    "os_posix_fallocate": "f = os.open('keep.txt', os.O_RDWR); os.posix_fallocate(f, 0, 9999)",
    "os_pwrite": "os.pwrite(os.open('model.pt', os.O_WRONLY), b'x', 3)",
    "os_sendfile": "a = os.open('Makefile', os.O_RDONLY); b = os.open('keep.txt', os.O_WRONLY); os.sendfile(b, a, 0, 9)",
    "os_copy_file_range": "a = os.open('Makefile', os.O_RDONLY); b = os.open('keep.txt', os.O_WRONLY); os.copy_file_range(a, b, 9)",
    "os_splice": "r, w = os.pipe(); os.write(w, b'xx'); os.splice(r, os.open('keep.txt', os.O_WRONLY), 2)",
    "os_mkfifo": "os.unlink('keep.txt'); os.mkfifo('keep.txt')",
    "os_mknod": "os.unlink('keep.txt'); os.mknod('keep.txt')",
    "os_chdir_absolute": "os.chdir(P); open('keep.txt', 'w').write('x')",
    "os_fchdir": "os.fchdir(os.open(D, os.O_RDONLY)); open('train.bin', 'w').write('x')",
    "os_system": "assert os.system('rm -rf out') == 0",
    "os_popen": "os.popen('rm -rf out').close()",
    "os_fork": "p = os.fork()\nif not p:\n    open('keep.txt', 'w').write('x')\n    os._exit(0)\nos.waitpid(p, 0)",
    "os_fork_exec": "p = os.fork()\nif not p:\n    os.execvp('rm', ['rm', '-rf', 'out'])\nassert os.waitpid(p, 0)[1] == 0",
    "os_posix_spawn": "p = os.posix_spawn('/bin/rm', ['rm', '-rf', 'out'], os.environ); assert os.waitpid(p, 0)[1] == 0",
    "os_posix_spawn_open": "p = os.posix_spawn('/bin/true', ['true'], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, 'keep.txt', os.O_WRONLY | os.O_TRUNC, 0)]); assert os.waitpid(p, 0)[1] == 0",
    "os_spawnv": "assert os.spawnv(os.P_WAIT, '/bin/rm', ['rm', '-rf', 'out']) == 0",
    "pty_spawn": "import pty; pty.spawn(['rm', '-rf', 'out']); assert not os.path.exists('out')",
    "subprocess_python": 'import subprocess; subprocess.run([sys.executable, \'-Sc\', \'open("keep.txt", "w").write("x")\'], check=True)',
    "subprocess_stdout": "import subprocess; subprocess.run(['echo', 'x'], stdout=open('keep.txt', 'w'), check=True)",
    "subprocess_shell": "import subprocess; subprocess.run('rm -rf out/*', shell=True, check=True)",
    "subprocess_session": "import subprocess; subprocess.run(['rm', '-r', 'out'], start_new_session=True, cwd=P, check=True)",
    "shutil_rmtree": "shutil.rmtree('out')",
    "shutil_rmtree_absolute": "shutil.rmtree(f'{P}/out')",
    "shutil_rmtree_data": "shutil.rmtree(D)",
    "shutil_move": "shutil.move('out', 'elsewhere')",
    "shutil_move_absolute": "shutil.move(f'{D}/train.bin', f'{P}/keep.txt')",
    "shutil_copy": "shutil.copy('Makefile', 'keep.txt')",
    "shutil_copy2": "shutil.copy2('Makefile', f'{D}/train.bin')",
    "shutil_copytree": "shutil.copytree('out/checkpoint-1', 'out/checkpoint-2', dirs_exist_ok=True)",
    "shutil_copystat": "shutil.copystat('clean.sh', 'keep.txt')",
    "shutil_make_archive": "shutil.make_archive('new', 'tar', 'out'); os.replace('new.tar', 'model.pt')",
    "shutil_unpack": "shutil.unpack_archive(f'{D}/keep.tar', P, 'tar')",
    "path_write_text": "Path('keep.txt').write_text('x')",
    "path_write_absolute": "(Path(H) / 'notes.txt').write_text('x')",
    "path_unlink": "Path(D, 'train.bin').unlink()",
    "path_touch": "Path('keep.txt').touch()",
    "path_chmod": "Path('keep.txt').chmod(0o777)",
    "path_replace": "Path('Makefile').replace(f'{P}/keep.txt')",
    "path_symlink": "Path('out/rel').unlink(); Path('out/rel').symlink_to('checkpoint-2')",
    "path_hardlink": "Path('again').hardlink_to('keep.txt'); Path('again').write_text('x')",
    "mmap": "import mmap; f = open('model.pt', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0:1] = b'x'; m.flush()",
    "mmap_absolute": "import mmap; f = open(f'{D}/train.bin', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0:1] = b'x'; m.close()",
    "ctypes_unlink": "assert libc.unlink(b'keep.txt') == 0",
    "ctypes_fopen": "libc.fopen.restype = ctypes.c_void_p; f = libc.fopen(f'{P}/keep.txt'.encode(), b'w'); assert f",
    "ctypes_system": "assert libc.system(b'rm -rf out') == 0",
    "ctypes_truncate": "assert libc.truncate(b'keep.txt', 0) == 0",
    "ctypes_creat": "assert libc.creat(f'{D}/train.bin'.encode(), 0o644) >= 0",
    "ctypes_syscall_unlinkat": "assert libc.syscall(263, -100, b'keep.txt', 0) == 0",
    "ctypes_openat2": "import struct; assert libc.syscall(437, -100, b'keep.txt', struct.pack('=3Q', os.O_WRONLY | os.O_TRUNC, 0, 0), 24) >= 0",
    "rename_exchange": "assert libc.renameat2(-100, b'keep.txt', -100, b'Makefile', 2) == 0",
    "rename_exchange_absolute": "assert libc.renameat2(-100, f'{P}/keep.txt'.encode(), -100, f'{P}/model.pt'.encode(), 2) == 0",
    "rename_exchange_new": "open('new', 'w').write('x'); assert libc.renameat2(-100, b'new', -100, f'{P}/keep.txt'.encode(), 2) == 0",
    "tmpfile_linkat": "f = os.open('.', os.O_TMPFILE | os.O_RDWR); os.write(f, b'x'); os.unlink('keep.txt'); assert libc.linkat(-100, f'/proc/self/fd/{f}'.encode(), -100, b'keep.txt', 0x400) == 0",
    "proc_self_cwd": "open('/proc/self/cwd/keep.txt', 'w').write('x')",
    "proc_thread_self": "open('/proc/thread-self/cwd/keep.txt', 'w').write('x')",
    "proc_fd_reopen": "f = os.open('keep.txt', os.O_PATH); open(f'/proc/self/fd/{f}', 'w').write('x')",
    "dev_fd_reopen": "f = os.open('keep.txt', os.O_RDONLY); os.truncate(f'/dev/fd/{f}', 0)",
    "sqlite3": "import sqlite3; c = sqlite3.connect('db.sqlite3'); c.execute('insert into t values (9)'); c.commit()",
    "sqlite3_absolute": "import sqlite3; c = sqlite3.connect(f'{P}/db.sqlite3'); c.execute('drop table t'); c.commit()",
    "sqlite3_attach": "import sqlite3; c = sqlite3.connect(':memory:'); c.execute('attach ? as o', (f'{P}/db.sqlite3',)); c.execute('delete from o.t'); c.commit()",
    "sqlite3_vacuum_into": "import sqlite3; sqlite3.connect('db.sqlite3').execute('vacuum into \"new.sqlite3\"'); os.replace('new.sqlite3', 'db.sqlite3')",
    "dbm": "import dbm.dumb; d = dbm.dumb.open('keep', 'n'); d['a'] = b'x'; d.close(); os.replace('keep.dat', 'keep.txt')",
    "shelve": "import shelve; s = shelve.open(f'{D}/shelf'); s['a'] = 1; s.close()",
    "tempfile_in_project": "import tempfile; f = tempfile.NamedTemporaryFile(dir=P, delete=False); f.write(b'x'); f.close(); os.replace(f.name, f'{P}/keep.txt')",
    "tempfile_default": "import tempfile; f = tempfile.NamedTemporaryFile(delete=False); f.write(b'x'); f.close(); shutil.move(f.name, 'keep.txt')",
    "fork_process": "import multiprocessing as m; p = m.get_context('fork').Process(target=os.unlink, args=('keep.txt',)); p.start(); p.join(); assert p.exitcode == 0",
    "spawn_process": "import multiprocessing as m; p = m.get_context('spawn').Process(target=os.unlink, args=('keep.txt',)); p.start(); p.join(); assert p.exitcode == 0",
    "forkserver_process": "import multiprocessing as m; p = m.get_context('forkserver').Process(target=os.unlink, args=(f'{P}/keep.txt',)); p.start(); p.join(); assert p.exitcode == 0",
    "pool": "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: p.map(os.unlink, ['keep.txt', 'model.pt'])",
    "process_pool": "from concurrent.futures import ProcessPoolExecutor as E\nwith E(1) as e: e.submit(shutil.rmtree, 'out').result()",
    "thread": "import threading; t = threading.Thread(target=shutil.rmtree, args=('out',)); t.start(); t.join(); assert not os.path.exists('out')",
    "thread_pool": "from concurrent.futures import ThreadPoolExecutor as E\nwith E(2) as e: list(e.map(os.unlink, ['keep.txt', 'model.pt']))",
    "asyncio": "import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('rm', '-rf', 'out'); assert await p.wait() == 0\nasyncio.run(f())",
    "atexit": "import subprocess; subprocess.run([sys.executable, '-Sc', 'import atexit, os; atexit.register(os.unlink, \"keep.txt\")'], check=True)",
    "signal_handler": "import signal; signal.signal(signal.SIGUSR1, lambda *a: os.unlink('keep.txt')); os.kill(os.getpid(), signal.SIGUSR1); assert not os.path.exists('keep.txt')",
    "finalizer": "import weakref\nclass A: pass\na = A(); weakref.finalize(a, os.unlink, 'keep.txt'); del a",
    "double_fork": "p = os.fork()\nif not p:\n    os.setsid()\n    if not os.fork(): shutil.rmtree('out'); os._exit(0)\n    os.wait(); os._exit(0)\nos.waitpid(p, 0)",
    "vfork_shell": "import subprocess; subprocess.check_call(['sh', '-c', 'sh clean.sh'])",
    "pickle": "import pickle; pickle.dump(1, open('keep.txt', 'wb'))",
    "json": "import json; json.dump({}, open(f'{D}/train.bin', 'w'))",
    "csv": "import csv; csv.writer(open('keep.txt', 'a')).writerow([1])",
    "gzip": "import gzip; gzip.open('keep.txt', 'wb').write(b'x')",
    "bz2": "import bz2; bz2.open('keep.txt', 'wb').write(b'x')",
    "lzma": "import lzma; lzma.open('keep.txt', 'wb').write(b'x')",
    "zipfile": "import zipfile; zipfile.ZipFile('model.pt', 'w').writestr('a', 'x')",
    "zipfile_append": "import zipfile; zipfile.ZipFile('keep.txt', 'a').writestr('a', 'x')",
    "tarfile": "import tarfile; tarfile.open(f'{D}/keep.tar').extractall(P)",
    "logging_w": "import logging; logging.FileHandler(f'{P}/keep.txt', mode='w').close()",
    "logging_rotate": "import logging.handlers as h; r = h.RotatingFileHandler('keep.txt', maxBytes=1, backupCount=1); r.doRollover()",
    "fileinput": "import fileinput\nfor line in fileinput.input('keep.txt', inplace=True): print('x')",
    "configparser": "import configparser; configparser.ConfigParser().write(open('keep.txt', 'w'))",
    "py_compile": "import py_compile; py_compile.compile('train.py', cfile='model.pt')",
    "compileall": "import compileall; compileall.compile_dir('.', quiet=1, force=True)",
    "io_fileio": "import io; io.FileIO('keep.txt', 'w').write(b'x')",
    "io_open_code": "import io; io.open('keep.txt', 'w').write('x')",
    "opener": "open('keep.txt', 'w', opener=lambda p, f: os.open(p, f)).write('x')",
    "fd_inherit": "import subprocess; f = os.open(f'{P}/keep.txt', os.O_WRONLY); subprocess.run(['sh', '-c', f'echo x >&{f}'], pass_fds=[f], check=True)",
    "send_fd": "import socket, array; a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [os.open('keep.txt', os.O_WRONLY)]); f = socket.recv_fds(b, 1, 1)[1][0]; os.write(f, b'x')",
    "bind_socket": "import socket; os.unlink('keep.txt'); socket.socket(socket.AF_UNIX).bind('keep.txt')",
    "umask": "os.umask(0); open(f'{D}/new', 'w').write('x')",
    "realpath_write": "open(os.path.realpath('keep.txt'), 'w').write('x')",
    "realpath_linked": "shutil.rmtree(os.path.realpath('linked'))",
    "readlink_write": "open(os.readlink('out/latest') + '/weights', 'w').write('x')",
    "abspath_file": "open(os.path.join(P, 'train.py'), 'a').write('x')",
    "glob_remove": "import glob; [shutil.rmtree(p) for p in glob.glob(f'{P}/out/checkpoint-*')]",
    "scandir_remove": "[os.unlink(e.path) for e in os.scandir(D) if e.is_file()]",
    "walk_remove": "[os.unlink(os.path.join(p, f)) for p, _, fs in os.walk(P, topdown=False) for f in fs if '.git' not in p and 'runs' not in p]",
    "walk_fd_remove": "[os.unlink(f, dir_fd=d) for _, _, fs, d in os.fwalk(f'{P}/out') for f in fs]",
    "home_expanduser": "open(os.path.expanduser('~/.bashrc'), 'a').write('x')",
    "dotdot": "open('../../data/train.bin', 'w').write('x')",
    "dotdot_rm": "shutil.rmtree('../docs')",
    "write_hard_pair": "open(f'{D}/hard.txt', 'w').write('x')",
    "flock_write": "import fcntl; f = open('keep.txt', 'r+'); fcntl.flock(f, 2); f.truncate(0)",
    "lease": "import fcntl; f = os.open('keep.txt', os.O_RDWR); os.write(f, b'lease')",
    "aio_write": "f = os.open('keep.txt', os.O_WRONLY); os.pwritev(f, [b'x'], 0)",
    "append_flag_off": "f = os.open('keep.txt', os.O_WRONLY | os.O_APPEND); os.lseek(f, 0, 0); os.write(f, b'x')",
    "read_only_file": "os.chmod('readonly.txt', 0o644); open('readonly.txt', 'w').write('x')",
    "unlink_read_only": "os.unlink('readonly.txt')",
    "path_read_then_write_back": "t = Path('keep.txt').read_text(); Path('keep.txt').unlink(); Path('keep.txt').write_text(t)",
    "set_flags": "import fcntl, struct; fcntl.ioctl(os.open('keep.txt', os.O_RDONLY), 0x40086602, struct.pack('l', 0x80))",
    "fallocate_zero": "f = os.open('model.pt', os.O_WRONLY); assert libc.fallocate(f, 0x10, ctypes.c_long(0), ctypes.c_long(100)) == 0",
    "fallocate_collapse": "f = os.open(f'{D}/train.bin', os.O_WRONLY); libc.fallocate(f, 8, ctypes.c_long(0), ctypes.c_long(4096)); os.ftruncate(f, 1)",
    "chmod_project": "os.chmod(P, 0o700)",
    "acl_of_new_files": "os.setxattr(D, 'system.posix_acl_default', bytes.fromhex('0200000001000700ffffffff04000700ffffffff20000700ffffffff'))",
    "set_project": "import fcntl; f = os.open('keep.txt', os.O_RDONLY); v = bytearray(fcntl.ioctl(f, 0x801c581f, bytes(28))); v[0] |= 0x40; fcntl.ioctl(f, 0x401c5820, bytes(v))",
}

NUMERIC = {
    "numpy_save": ("numpy", "import numpy as n; n.save('values.npy', n.zeros(3))"),
    "numpy_tofile": ("numpy", "import numpy as n; n.zeros(9).tofile(f'{P}/model.pt')"),
    "numpy_savez": ("numpy", "import numpy as n; n.savez(f'{D}/values.npz', a=n.zeros(3))"),
    "numpy_memmap": ("numpy", "import numpy as n; m = n.memmap('model.pt', mode='r+'); m[:] = 0; m.flush()"),
    "numpy_memmap_absolute": (
        "numpy",
        "import numpy as n; m = n.memmap(f'{D}/train.bin', mode='r+'); m[:] = 0; m.flush()",
    ),
    "numpy_memmap_w": ("numpy", "import numpy as n; n.memmap('model.pt', mode='w+', shape=(9,))"),
    "numpy_savetxt": ("numpy", "import numpy as n; n.savetxt('keep.txt', n.zeros(3))"),
    "torch_save": (TORCH, "import torch; torch.save(torch.zeros(3), 'model.pt')"),
    "torch_save_absolute": (TORCH, "import torch; torch.save({}, f'{P}/out/checkpoint-1/weights')"),
    "torch_jit_save": (
        TORCH,
        "import torch; torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)).save(f'{P}/model.pt')",
    ),
    "torch_from_file": (TORCH, "import torch; torch.from_file(f'{P}/model.pt', shared=True, size=4).fill_(3)"),
    "torch_from_file_grown": (TORCH, "import torch; torch.from_file('keep.txt', shared=True, size=400).fill_(3)"),
    "torch_profile": (
        TORCH,
        "import torch\nwith torch.profiler.profile() as p: torch.zeros(3) + 1\np.export_chrome_trace(f'{P}/keep.txt')",
    ),
    "torch_writer": (
        TORCH,
        "import torch; w = torch._C.PyTorchFileWriter(f'{P}/model.pt'); w.write_record('a', b'xx', 2); w.write_end_of_file()",
    ),
    "safetensors": (
        "safetensors",
        "import torch, safetensors.torch as s; s.save_file({'a': torch.zeros(3)}, f'{P}/model.pt')",
    ),
    "safetensors_relative": (
        "safetensors",
        "import numpy as n, safetensors.numpy as s; s.save_file({'a': n.zeros(3)}, 'model.pt')",
    ),
    "pandas_parquet": ("pandas", "import pandas as p; p.DataFrame({'a': [1]}).to_parquet(f'{D}/train.bin')"),
    "pandas_csv": ("pandas", "import pandas as p; p.DataFrame({'a': [1]}).to_csv('keep.txt')"),
    "pandas_pickle": ("pandas", "import pandas as p; p.DataFrame({'a': [1]}).to_pickle(f'{P}/keep.txt')"),
    "pyarrow_output_stream": (
        PYARROW,
        "import pyarrow as p; s = p.output_stream(f'{P}/keep.txt'); s.write(b'x'); s.close()",
    ),
    "pyarrow_memory_map": (
        PYARROW,
        "import pyarrow as p; m = p.memory_map(f'{P}/model.pt', 'r+'); m.write(b'x'); m.close()",
    ),
    "pyarrow_create_map": (PYARROW, "import pyarrow as p; p.create_memory_map('model.pt', 9).close()"),
    "pyarrow_ipc": (
        PYARROW,
        "import pyarrow as p; t = p.table({'a': [1]}); w = p.ipc.new_file(f'{P}/keep.txt', t.schema); w.write(t); w.close()",
    ),
    "pyarrow_orc": (
        PYARROW,
        "import pyarrow as p, pyarrow.orc as o; o.write_table(p.table({'a': [1]}), f'{P}/keep.txt')",
    ),
    "pyarrow_delete_dir": (PYARROW, "import pyarrow.fs as f; f.LocalFileSystem().delete_dir(f'{P}/out')"),
    "pyarrow_move": (PYARROW, "import pyarrow.fs as f; f.LocalFileSystem().move(f'{P}/keep.txt', f'{P}/b.txt')"),
    "pyarrow_parquet": (
        PYARROW,
        "import pyarrow as p, pyarrow.parquet as q; q.write_table(p.table({'a': [1]}), 'keep.txt')",
    ),
    "pyarrow_osfile": (PYARROW, "import pyarrow as p; f = p.OSFile(f'{D}/train.bin', 'w'); f.write(b'x'); f.close()"),
}

BREAK_OUT_SHELL = {
    "proc_outside_cwd": "echo x > /proc/$OUT/cwd/keep.txt",
    "proc_outside_root": 'echo x > "/proc/$OUT/root$P/keep.txt"',
    "proc_outside_rm": "rm -rf /proc/$OUT/cwd/out",
    "proc_outside_fd": "echo x > /proc/$OUT/fd/9",
    "proc_parent_cwd": 'for p in /proc/[0-9]*; do echo x > "$p/root$P/keep.txt"; done 2> /dev/null',
    "proc_init_root": 'echo x > "/proc/1/root$P/keep.txt"',
    "chroot_outside": 'chroot /proc/$OUT/root sh -c "echo x > $P/keep.txt"',
    "umount_all": 'umount -l "$P" / "$D" /tmp /work /var; echo x > keep.txt',
    "umount_root": 'umount -l /; rm -rf "$P/out"',
    "bind_over": 'mount --bind /proc/$OUT/root"$P" empty && rm empty/keep.txt',
    "bind_root": 'mount --bind / empty && echo x > "empty$P/keep.txt"',
    "remount": 'mount -o remount,bind,rw "$P"; echo x > keep.txt',
    "move_mount": "mount --move / empty; rm -rf empty/out",
    "nsenter_outside": "nsenter -t $OUT -m rm -rf out",
    "nsenter_init": 'nsenter -t 1 -m -- rm -rf "$P/out"',
    "nsenter_user": 'nsenter -t $OUT -U -m rm -rf "$P/out"',
    "unshare_user": 'unshare -Urm sh -c "umount -l $P; rm -rf $P/out"',
    "unshare_mount": 'unshare -m sh -c "umount -l /; rm -rf $P/out"',
    "unshare_nsenter": "unshare -Ur nsenter -t $OUT -m rm -rf out",
    "chattr": "chattr +i keep.txt; chattr +A model.pt; chattr +d out",
    "mkswap": "mkswap -q -f model.pt || mkswap model.pt",
    "crontab": "echo '* * * * * true' | crontab -",
    "su": "su -c 'rm -rf out' || setpriv --reuid 0 rm -rf out",
    "sudo": "sudo -n rm -rf out || rm -rf out",
}

BREAK_OUT_PYTHON = {
    "mount_ctypes": "libc.mount(f'/proc/{OUT}/root'.encode(), b'empty', None, 4096, None); open(f'empty{P}/keep.txt', 'w').write('x')",
    "umount_ctypes": "libc.umount2(b'/', 2); libc.umount2(P.encode(), 2); open(f'{P}/keep.txt', 'w').write('x')",
    "setns_outside": "f = os.open(f'/proc/{OUT}/ns/mnt', os.O_RDONLY); assert libc.setns(f, 0) == 0; open(f'{P}/keep.txt', 'w').write('x')",
    "pidfd_setns": "f = os.pidfd_open(int(OUT)); assert libc.setns(f, 0x20000) == 0; open(f'{P}/keep.txt', 'w').write('x')",
    "setns_user_outside": "f = os.open(f'/proc/{OUT}/ns/user', os.O_RDONLY); libc.setns(f, 0); f = os.open(f'/proc/{OUT}/ns/mnt', os.O_RDONLY); libc.setns(f, 0); open(f'{P}/keep.txt', 'w').write('x')",
    "pidfd_getfd": "f = libc.syscall(438, os.pidfd_open(int(OUT)), 9, 0); os.write(f, b'x')",
    "ptrace": "import time; libc.ptrace(16, int(OUT), 0, 0) == 0 and open(f'/proc/{OUT}/mem', 'wb')",
    "process_vm": "open(f'/proc/{OUT}/mem', 'r+b')",
    "chroot_escape": "f = os.open('/', os.O_RDONLY); os.chroot('out'); os.fchdir(f)\nfor _ in range(64): os.chdir('..')\nos.chroot('.'); open(f'{P}/keep.txt', 'w').write('x')",
    "folder_opened_before": "os.open('keep.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=BEFORE)",
    "folder_opened_before_unlink": "os.unlink('keep.txt', dir_fd=BEFORE)",
    "folder_opened_before_chdir": "os.fchdir(BEFORE); open('keep.txt', 'w').write('x')",
    "folder_opened_before_chmod": "os.chmod('keep.txt', 0, dir_fd=BEFORE)",
    "file_opened_before_chmod": "os.fchmod(os.open('keep.txt', os.O_RDONLY, dir_fd=BEFORE), 0)",
    "file_opened_before_utime": "os.utime('keep.txt', (1, 1), dir_fd=BEFORE)",
    "file_opened_before_setxattr": "os.setxattr(os.open('keep.txt', os.O_RDONLY, dir_fd=BEFORE), 'user.x', b'x')",
    "file_opened_before_ioctl": "import fcntl, struct; fcntl.ioctl(os.open('keep.txt', os.O_RDONLY, dir_fd=BEFORE), 0x40086602, struct.pack('l', 0x80))",
    "file_opened_before_link": "os.link('keep.txt', f'{P}/out/k', src_dir_fd=BEFORE); open(f'{P}/out/k', 'w').write('x')",
    "open_by_handle": """
h = ctypes.create_string_buffer(136); h[0:8] = (128).to_bytes(4, 'little') + bytes(4); m = ctypes.c_int()
assert libc.name_to_handle_at(BEFORE, b'keep.txt', h, ctypes.byref(m), 0) == 0
for at in (BEFORE, os.open(os.environ['RUN'], os.O_RDONLY), os.open(os.path.expanduser('~/.cache/pip'), os.O_RDONLY)):
    f = libc.open_by_handle_at(at, h, os.O_WRONLY | os.O_TRUNC)
    if f >= 0: os.write(f, b'x')""",
    "open_tree": "f = libc.syscall(428, BEFORE, b'.', 1); open(f'/proc/self/fd/{f}/keep.txt', 'w').write('x')",
    "move_mount": "f = libc.syscall(428, -100, f'/proc/{OUT}/root'.encode(), 0x8001); libc.syscall(429, f, b'', -100, b'empty', 4); open(f'empty{P}/keep.txt', 'w').write('x')",
    "mount_setattr": "import struct; libc.syscall(442, -100, b'/', 0x8000, struct.pack('4Q', 0, 1, 0, 0), 32); open(f'{P}/keep.txt', 'w').write('x')",
    "pivot_root": "libc.syscall(155, b'.', b'.'); libc.umount2(b'.', 2); open(f'{P}/keep.txt', 'w').write('x')",
    "io_uring_setxattr": """
import mmap, struct
p = ctypes.create_string_buffer(120); f = libc.syscall(425, 4, p)
if f < 0: raise OSError('no io_uring')
o = struct.unpack_from('10I', p.raw, 40); ring = mmap.mmap(f, o[6] + 4096, offset=0); sqes = mmap.mmap(f, 4096, offset=0x10000000)
name, value, path = (ctypes.create_string_buffer(one) for one in (b'user.ring', b'x', f'{P}/keep.txt'.encode()))
struct.pack_into('<BBHiQQIIQHHiQQ', sqes, 0, 42, 0, 0, 0, ctypes.addressof(value), ctypes.addressof(name), 1, 0, 7, 0, 0, 0, ctypes.addressof(path), 0)
struct.pack_into('<I', ring, o[6], 0); tail, = struct.unpack_from('<I', ring, o[1]); struct.pack_into('<I', ring, o[1], tail + 1)
assert libc.syscall(426, f, 1, 1, 1, None, 0) == 1""",
    "file_setattr": "import struct; libc.syscall(469, -100, f'{P}/keep.txt'.encode(), struct.pack('=QIIIIQ', 0x40, 0, 0, 0, 0, 0)[:32], 24, 0)",
    "setxattrat": "v = ctypes.create_string_buffer(b'x'); import struct; libc.syscall(463, -100, f'{P}/keep.txt'.encode(), 0, b'user.at', struct.pack('=QII', ctypes.addressof(v), 1, 0), 16)",
    "fchmodat2": "libc.syscall(452, -100, f'{P}/keep.txt'.encode(), 0, 0)",
    "x32_chmod": "libc.syscall(0x40000000 + 90, f'{P}/keep.txt'.encode(), 0)",
    "int80_chmod": """
import mmap, struct
m = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40, prot=7); base = ctypes.addressof(ctypes.c_char.from_buffer(m))
path = f'{P}/keep.txt'.encode() + b'\\0'; m[4096:4096 + len(path)] = path
m[0:20] = bytes.fromhex('53b8') + struct.pack('<I', 15) + bytes.fromhex('bb') + struct.pack('<I', base + 4096) + bytes.fromhex('b9') + struct.pack('<I', 0) + bytes.fromhex('cd805bc3')
ctypes.CFUNCTYPE(ctypes.c_int)(base)()""",
    "trace_children_of_init": "[open(f'/proc/{p}/cwd/keep.txt', 'w') for p in os.listdir('/proc') if p.isdigit() and os.path.exists(f'/proc/{p}/cwd/keep.txt')]",
    "signal_out": "os.kill(int(OUT), 0); open(f'/proc/{OUT}/cwd/keep.txt', 'w').write('x')",
}

BREAK_OUT_SHELL |= {
    "kill_outside": "kill -9 $OUT",
    "pkill_outside": 'for p in /proc/[0-9]*; do if test "$(readlink $p/cwd)" = "$P"; then kill -TERM ${p#/proc/}; fi; done; sleep 0.02',
    "daemon_writes_late": '(setsid sh -c \'sleep 0.1; echo x > "$P/keep.txt"; rm -rf "$P/out"\' > /dev/null 2>&1 &)',
    "daemon_in_folder_opened_before": "(cd out && setsid sh -c 'sleep 0.1; rm -rf *' > /dev/null 2>&1 &)",
    "mount_tmpfs_over": "mount -t tmpfs none out && echo x > out/model.pt; umount out; echo x > out/model.pt",
    "overlay_of_project": 'unshare -Urm sh -c "mkdir -p /tmp/u /tmp/w; mount -t overlay o -o lowerdir=$D,upperdir=$P/out,workdir=$P/empty $P/out && echo x > $P/out/new"',
    "unshare_pid_proc": 'unshare -Urpfm --mount-proc sh -c "rm -rf $P/out"',
    "unshare_keep_caps": 'unshare -Urm --keep-caps sh -c "mount -o remount,rw,bind / ; rm -rf $P/out"',
    "umount_until_nothing": 'for i in 1 2 3 4 5 6 7 8; do umount -l "$P" "$H" /var/tmp /var /; done; echo x > "$P/keep.txt"',
    "proc_outside_task_root": 'echo x > "/proc/$OUT/task/$OUT/root$P/keep.txt"; echo x > "/proc/$OUT/task/$OUT/cwd/keep.txt"',
    "proc_outside_map_files": "for f in /proc/$OUT/map_files/*; do echo x > $f; done",
    "cp_to_outside_root": 'cp Makefile "/proc/$OUT/root$P/keep.txt"; ln -sf /proc/$OUT/root r; echo x > "r$P/keep.txt"',
    "at": "echo 'rm -rf out' | at now; rm -rf out",
    "systemd_run": "systemd-run --user rm -rf out || rm -rf out",
    "gdb_attach": 'gdb -batch -p $OUT -ex "call (int)unlink("keep.txt")" || rm keep.txt',
}

BREAK_OUT_PYTHON |= {
    "sigio_kill": "import fcntl, socket, time; a, b = socket.socketpair(); fcntl.fcntl(a, fcntl.F_SETOWN, int(OUT)); fcntl.fcntl(a, 10, 9); fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC); b.send(b'x'); time.sleep(0.2)",
    "dnotify_kill": "import fcntl, time; f = os.open('.', os.O_RDONLY); fcntl.fcntl(f, fcntl.F_SETOWN, -int(OUT)); fcntl.fcntl(f, 10, 9); fcntl.fcntl(f, 1026, 0x8000003f); open('new', 'w').close(); time.sleep(0.2)",
    "kill_outside": "os.kill(int(OUT), 9)",
    "killpg_outside": "os.killpg(os.getpgid(int(OUT)), 9) if os.getpgid(int(OUT)) != os.getpgrp() else None",
    "pidfd_kill": "import signal; signal.pidfd_send_signal(os.pidfd_open(int(OUT)), 9)",
    "tgkill": "libc.syscall(234, int(OUT), int(OUT), 9)",
    "queue_signal": "libc.sigqueue(int(OUT), 9, 0)",
    "process_vm_writev": "libc.process_vm_writev(int(OUT), (ctypes.c_void_p * 2)(0, 8), 1, (ctypes.c_void_p * 2)(4096, 8), 1, 0)",
    "fsopen_bind": "f = libc.syscall(428, -100, f'/proc/{OUT}/cwd'.encode(), 1); g = os.open(f'/proc/self/fd/{f}/keep.txt', os.O_WRONLY | os.O_TRUNC)",
    "open_tree_attr": "f = libc.syscall(467, -100, P.encode(), 1, None, 0); os.open(f'/proc/self/fd/{f}/keep.txt', os.O_WRONLY | os.O_TRUNC)",
    "setns_all": "f = os.pidfd_open(int(OUT)); libc.setns(f, 0x10020000); libc.setns(f, 0x20000); os.open(f'{P}/keep.txt', os.O_WRONLY | os.O_TRUNC)",
    "listns": "import glob\nfor n in glob.glob('/proc/[0-9]*/ns/mnt'):\n    try: libc.setns(os.open(n, os.O_RDONLY), 0)\n    except OSError: pass\nopen(f'{P}/keep.txt', 'w').write('x')",
    "capset_back": "import struct; h = struct.pack('=Ii', 0x20080522, 0); libc.capset(h, struct.pack('=6I', *[0xffffffff] * 6)); libc.mount(f'/proc/{OUT}/root'.encode(), b'empty', None, 4096, None); open(f'empty{P}/keep.txt', 'w').write('x')",
    "new_user_namespace_caps": "assert libc.unshare(0x10000000) == 0; libc.setns(os.open(f'/proc/{OUT}/ns/mnt', os.O_RDONLY), 0); open(f'{P}/keep.txt', 'w').write('x')",
    "seccomp_off": "libc.prctl(22, 0, 0, 0, 0); os.chmod('/proc/self/cwd/keep.txt', 0); raise SystemExit",
    "personality": "libc.personality(0x0040000); os.chmod('keep.txt', 0)",
    "ioctl_fiemap_clone": "import fcntl; a = os.open('Makefile', os.O_RDONLY); b = os.open('keep.txt', os.O_RDWR, dir_fd=BEFORE); fcntl.ioctl(b, 0x40049409, a)",
    "ioctl_from_before": "import fcntl, struct; f = os.open('model.pt', os.O_RDONLY, dir_fd=BEFORE); fcntl.ioctl(f, 0x4020940d, bytes(32)); fcntl.ioctl(f, 0xc0185879, bytes(24))",
    "ext4_move_extents": "import fcntl, struct; a = os.open('keep.txt', os.O_RDONLY, dir_fd=BEFORE); b = os.open('model.pt', os.O_RDONLY, dir_fd=BEFORE); fcntl.ioctl(a, 0xc028660f, struct.pack('IIQQQQ', 0, b, 0, 0, 1, 0))",
    "ext4_swap_boot": "import fcntl; f = os.open('model.pt', os.O_RDONLY, dir_fd=BEFORE); fcntl.ioctl(f, 0x6611)",
    "fs_verity": "import fcntl, struct; f = os.open('keep.txt', os.O_RDONLY, dir_fd=BEFORE); fcntl.ioctl(f, 0x40806685, struct.pack('=IIIIQII', 1, 1, 4096, 0, 0, 0, 0) + bytes(96))",
    "quota_project": "import fcntl; f = os.open('.', os.O_RDONLY, dir_fd=BEFORE); v = bytearray(fcntl.ioctl(f, 0x801c581f, bytes(28))); v[8:12] = b'\\x07\\0\\0\\0'; fcntl.ioctl(f, 0x401c5820, bytes(v))",
    "mount_same_disk": """
import subprocess
disk = subprocess.check_output(['findmnt', '-no', 'SOURCE,FSTYPE', '-T', os.environ['RUN']], text=True).split()[:2]
f = libc.syscall(430, disk[1].encode(), 0); libc.syscall(431, f, 1, b'source', disk[0].encode(), 0)
assert libc.syscall(431, f, 6, None, None, 0) == 0; m = libc.syscall(432, f, 0, 0); os.open('.' + P + '/keep.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=m)""",
    "lease": "import fcntl; f = os.open('keep.txt', os.O_RDONLY, dir_fd=BEFORE); fcntl.fcntl(f, 1024, 0); os.utime(f, (1, 1)); os.fchmod(f, 0)",
    "utimensat_empty": "f = os.open('keep.txt', os.O_RDONLY, dir_fd=BEFORE); libc.utimensat(f, None, bytes(32), 0); libc.futimens(f, bytes(32))",
    "fchownat_empty": "f = os.open('keep.txt', os.O_PATH, dir_fd=BEFORE); libc.fchownat(f, b'', os.getuid(), os.getgid(), 0x1000)",
    "fsetxattr_before": "f = os.open('.', os.O_RDONLY, dir_fd=BEFORE); os.setxattr(f, 'user.x', b'x'); os.removexattr(os.open('keep.txt', os.O_RDONLY, dir_fd=BEFORE), 'user.owner')",
    "acl": "import struct; os.setxattr('keep.txt', 'system.posix_acl_access', struct.pack('<I', 2) + b''.join(struct.pack('<HHI', *e) for e in ((1, 7, 0xffffffff), (2, 7, 99), (4, 7, 0xffffffff), (16, 7, 0xffffffff), (32, 7, 0xffffffff))))",
    "inotify_then_write": "f = libc.inotify_init(); libc.inotify_add_watch(f, P.encode(), 0xfff); open(f'{P}/keep.txt', 'w').write('x')",
    "fanotify_handle": "f = libc.fanotify_init(0x200, 0); libc.fanotify_mark(f, 1, ctypes.c_uint64(2), BEFORE, None); open(f'{P}/keep.txt', 'w').write('x')",
    "sysv_shared_memory": "i = libc.shmget(0x5eed, 4096, 0o1600); libc.shmctl(i, 0, None); open(f'{P}/keep.txt', 'w').write('x')",
    "io_uring_unlink": """
import mmap, struct
p = ctypes.create_string_buffer(120); f = libc.syscall(425, 4, p)
if f < 0: raise OSError('no io_uring')
o = struct.unpack_from('10I', p.raw, 40); ring = mmap.mmap(f, o[6] + 4096, offset=0); sqes = mmap.mmap(f, 4096, offset=0x10000000)
path = ctypes.create_string_buffer(f'{P}/keep.txt'.encode())
struct.pack_into('<BBHiQQIIQHHiQQ', sqes, 0, 36, 0, 0, -100, 0, ctypes.addressof(path), 0, 0, 7, 0, 0, 0, 0, 0)
struct.pack_into('<I', ring, o[6], 0); tail, = struct.unpack_from('<I', ring, o[1]); struct.pack_into('<I', ring, o[1], tail + 1)
assert libc.syscall(426, f, 1, 1, 1, None, 0) == 1""",
}

# Ways that reach a file by a cache that stays writable, by what was opened before, or by a part of the kernel that checks no path.
BREAK_OUT_PYTHON |= {
    "link_into_cache": "k = os.path.expanduser('~/.cache/pip/k'); os.link(f'{P}/keep.txt', k); open(k, 'w').write('x')",
    "link_opened_before_into_cache": "k = os.path.expanduser('~/.cache/pip/k'); os.link('keep.txt', k, src_dir_fd=BEFORE); open(k, 'w').write('x')",
    "link_descriptor_into_cache": "k = os.path.expanduser('~/.cache/pip/k'); f = os.open('keep.txt', os.O_RDONLY, dir_fd=BEFORE); assert libc.linkat(-100, f'/proc/self/fd/{f}'.encode(), -100, k.encode(), 0x400) == 0; open(k, 'w').write('x')",
    "move_into_cache": "k = os.path.expanduser('~/.cache/pip/k'); assert libc.rename(f'{P}/out/checkpoint-1'.encode(), k.encode()) == 0",
    "tmpfile_in_cache_linked_out": "f = os.open(os.path.expanduser('~/.cache/pip'), os.O_TMPFILE | os.O_RDWR); assert libc.linkat(-100, f'/proc/self/fd/{f}'.encode(), BEFORE, b'new', 0x400) == 0",
    "exchange_opened_before": "libc.renameat2(BEFORE, b'keep.txt', BEFORE, b'Makefile', 2); libc.symlinkat(b'x', BEFORE, b'link'); libc.mkdirat(BEFORE, b'folder', 0o755); libc.unlinkat(BEFORE, b'model.pt', 0)",
    "parent_of_folder_opened_before": "os.fchdir(BEFORE); os.chdir('../docs'); open('a.txt', 'w').write('x'); open('../project/keep.txt', 'w').write('x')",
    "openat2_below_folder_opened_before": "import struct; f = libc.syscall(437, BEFORE, b'out/../keep.txt', struct.pack('=3Q', os.O_WRONLY | os.O_TRUNC, 0, 8), 24)",
    "memory_of_a_shared_page": "libc.mmap.restype = ctypes.c_void_p; f = os.open('keep.txt', os.O_RDONLY, dir_fd=BEFORE); a = libc.mmap(None, 4096, 1, 1, f, ctypes.c_long(0)); os.pwrite(os.open('/proc/self/mem', os.O_RDWR), b'x', a)",
    "remove_pages": "libc.mmap.restype = ctypes.c_void_p; f = os.open('model.pt', os.O_RDONLY, dir_fd=BEFORE); a = libc.mmap(None, 4096, 1, 1, f, ctypes.c_long(0)); libc.madvise(ctypes.c_void_p(a), 4096, 9); libc.mprotect(ctypes.c_void_p(a), 4096, 3) == 0 and ctypes.memset(a, 0, 9)",
    "pipe_page": "f = os.open('keep.txt', os.O_RDONLY, dir_fd=BEFORE); r, w = os.pipe(); n = 65536; os.write(w, bytes(n)); os.read(r, n); os.splice(f, w, 1); os.write(w, b'dirty')",
    "process_accounting": "libc.acct(f'{P}/keep.txt'.encode())",
    "fspick_reconfigure": "f = libc.syscall(433, -100, b'/', 0); libc.syscall(431, f, 0, b'rw', None, 0); libc.syscall(431, f, 1, b'upperdir', P.encode(), 0); libc.syscall(431, f, 7, None, None, 0)",
    "landlock_allows_again": "import struct; r = libc.syscall(444, struct.pack('=Q', 2), 8, 0); libc.syscall(445, r, 1, struct.pack('=Qi', 2, os.open('/', os.O_PATH)), 0); libc.syscall(446, r, 0); os.open('keep.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=BEFORE)",
    "capability_of_a_file": "[os.setxattr(f'{P}/clean.sh', 'security.capability', bytes.fromhex('0100000200200000000000000000000000000000'))]",
    "redirect_of_a_layer": "[libc.setxattr(f'{P}/out'.encode(), f'{kind}.overlay.{key}'.encode(), value, len(value), 0) for kind in ('user', 'trusted') for key, value in (('redirect', b'/data'), ('opaque', b'y'), ('metacopy', b''))]; shutil.rmtree(f'{P}/out')",
    "whiteout_device": "os.unlink(f'{P}/keep.txt'); os.mknod(f'{P}/keep.txt', 0o20000, 0)",
}

BREAK_OUT_SHELL |= {
    "core_file": "ulimit -c unlimited; cd \"$P/out\" && sh -c 'kill -SEGV $$'",
    "shared_mounts": 'mount --make-rshared /; mount --bind "$D" "$P/out"; echo x > "$P/out/train.bin"; umount "$P/out"; rm -r "$P/out"',
    "tmux": "tmux -L $$ new-session -d 'rm -rf out'; sleep 0.1; tmux -L $$ kill-server",
}

BREAK_OUT_SHELL |= {
    "proc_root_dots": 'cd /proc/self/cwd/../../../../../../../..; echo x > ".$P/keep.txt"; cd -P /proc/$PPID/root; echo x > ".$P/keep.txt"; cd /proc/$PPID/cwd && echo x > keep.txt',
    "pivot_sh": 'mkdir -p $T/n && mount -t tmpfs n $T/n; unshare -Urm sh -c "mount --rbind / $T; cd $T; pivot_root . tmp; rm -rf /$P/out"',
}

BREAK_OUT_PYTHON |= {
    "unshare_all": "[libc.unshare(f) for f in (0x20000, 0x10000000, 0x20000, 0x2000000, 0x4000000, 0x20000000, 0x40000000)]; libc.umount2(P.encode(), 2); libc.mount(b'/proc/self/root', b'empty', None, 0x5000, None); open(f'{P}/keep.txt', 'w').write('x')",
    "handle_of_ancestors": """
h = ctypes.create_string_buffer(136); h[0:8] = (128).to_bytes(4, 'little') + bytes(4); m = ctypes.c_int()
for at in ('/', P, H, D, '/dev/shm', '/tmp', '/var/tmp', '/proc/self/cwd', os.environ['RUN']):
    for flag in (0, 0x200, 0x1000):
        h[0:4] = (128).to_bytes(4, 'little')
        if libc.name_to_handle_at(-100, f'{P}/keep.txt'.encode(), h, ctypes.byref(m), flag & 0xfff) == 0:
            for one in (at,):
                try: f = libc.open_by_handle_at(os.open(one, os.O_RDONLY), h, os.O_RDWR)
                except OSError: continue
                if f >= 0: os.write(f, b'x')""",
    "fsmount_overlay": "f = libc.syscall(430, b'overlay', 0); [libc.syscall(431, f, 1, k, v, 0) for k, v in ((b'lowerdir', D.encode()), (b'upperdir', f'{P}/out'.encode()), (b'workdir', f'{P}/empty'.encode()))]; libc.syscall(431, f, 6, None, None, 0); m = libc.syscall(432, f, 0, 0); m >= 0 and os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=m)",
    "dup_all_inherited": """
for n in range(3, 256):
    try: t = os.readlink(f'/proc/self/fd/{n}')
    except OSError: continue
    if n == BEFORE: continue
    try: os.write(n, b'x')
    except OSError: pass
    try: os.ftruncate(n, 0)
    except OSError: pass""",
    "reopen_all_inherited": """
for n in os.listdir('/proc/self/fd'):
    for flags in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
        try: os.write(os.open(f'/proc/self/fd/{n}', flags), b'')
        except OSError: pass""",
}

PYTHON |= {
    "large_file": "f = open('model.pt', 'r+b'); f.seek(3 << 30); f.write(b'x'); f.close(); assert os.path.getsize('model.pt') > 3 << 30",
    "long_path": "os.chdir('out')\nfor _ in range(15):\n    os.mkdir('d' * 200); os.chdir('d' * 200)\nopen('x', 'w').write('x'); shutil.rmtree(f'{P}/out/checkpoint-1')",
    "odd_names": "[open(f'{P}/out/{n}', 'w').write('x') for n in ('a\\nb', ' ', '-rf', '$(rm)', '\\x7f', 'é', '*')]; os.rename(f'{P}/keep.txt', f'{P}/out/new\\nline')",
    "symlink_chain": "os.symlink(P, 'out/a'); os.symlink('a/out', 'out/b'); os.symlink('b/../out/a', 'out/c'); open('out/c/out/b/c/keep.txt', 'w').write('x')",
    "symlink_to_root": "os.symlink('/', 'root'); open(f'root{P}/keep.txt', 'w').write('x'); os.unlink(f'root/{D}/train.bin')",
    "renameat2_noreplace": "assert libc.renameat2(-100, b'keep.txt', -100, f'{P}/out/k'.encode(), 1) == 0",
    "rename_whiteout": "r = libc.renameat2(-100, b'keep.txt', -100, b'w', 4); os.path.exists('keep.txt') and os.unlink('keep.txt')",
    "fallocate_modes": "f = os.open('model.pt', os.O_RDWR); libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long); [libc.fallocate(f, m, 0, 4096) for m in (3, 8, 16, 17, 32)]; os.write(f, b'x')",
    "preadv2_append": "f = os.open('keep.txt', os.O_WRONLY); os.pwritev(f, [b'x'], 0, os.RWF_APPEND)",
    "vmsplice": "r, w = os.pipe(); b = ctypes.create_string_buffer(b'xx'); libc.vmsplice(w, (ctypes.c_void_p * 2)(ctypes.addressof(b), 2), 1, 0); f = os.open('keep.txt', os.O_WRONLY); os.splice(r, f, 2)",
    "mmap_shared_fork": "import mmap; f = open('model.pt', 'r+b'); m = mmap.mmap(f.fileno(), 0)\nif not os.fork():\n    m[:9] = bytes(9); m.flush(); os._exit(0)\nos.wait(); assert m[:9] == bytes(9)",
    "memfd_to_file": "f = os.memfd_create('x'); os.write(f, b'xx'); os.sendfile(os.open('keep.txt', os.O_WRONLY | os.O_TRUNC), f, 0, 2)",
    "aio": "import concurrent.futures as c; f = os.open(f'{D}/train.bin', os.O_WRONLY)\nwith c.ThreadPoolExecutor() as e: list(e.map(lambda n: os.pwrite(f, b'x', n), range(9)))",
    "sync_file": "f = os.open('keep.txt', os.O_WRONLY | os.O_SYNC); os.write(f, b'x'); os.fsync(f)",
    "tmpfile_replace": "import tempfile\nwith tempfile.NamedTemporaryFile('w', dir='out', delete=False) as f: f.write('x')\nos.replace(f.name, 'out/model.pt')",
    "sqlite_wal": "import sqlite3; c = sqlite3.connect(f'{P}/db.sqlite3'); c.execute('pragma journal_mode=wal'); c.execute('insert into t values (1)'); c.commit(); c.execute('pragma wal_checkpoint(truncate)'); c.close()",
    "sqlite_vacuum": "import sqlite3; c = sqlite3.connect('db.sqlite3', isolation_level=None); c.execute('vacuum')",
    "resource_tracker": "from multiprocessing import shared_memory as s; m = s.SharedMemory(create=True, size=64, track=True) if sys.version_info >= (3, 13) else s.SharedMemory(create=True, size=64); m.buf[0] = 1; m.close(); m.unlink(); os.unlink('keep.txt')",
    "exec_in_place": "os.execv('/bin/sh', ['sh', '-c', 'rm -rf out && echo x > keep.txt'])",
    "import_hook_pyc": "sys.dont_write_bytecode = False; sys.path.insert(0, P); import importlib; importlib.import_module('train')",
    "site_packages_of_user": "f = os.path.expanduser('~/.local/lib/python3/site-packages'); os.makedirs(f); open(f + '/evil.pth', 'w').write('import os')",
    "shell_history": "open(os.path.expanduser('~/.bash_history'), 'a').write('x'); os.makedirs(os.path.expanduser('~/.ssh')); open(os.path.expanduser('~/.ssh/authorized_keys'), 'a').write('x')",
    "chmod_then_rm_tree": "os.chmod('out', 0); os.chmod('out', 0o700); shutil.rmtree('out')",
    "cwd_removed": "os.chdir('out/checkpoint-1'); shutil.rmtree('../../out')",
    "parent_renamed": "os.rename('out/checkpoint-1', 'out/x'); os.chdir('out/x'); open('../model.pt', 'w').write('x')",
}

NUMERIC |= {
    "torch_save_fd": (
        TORCH,
        "import torch\nwith os.fdopen(os.open(f'{P}/model.pt', os.O_WRONLY | os.O_TRUNC), 'wb') as f: torch.save({}, f)",
    ),
    "torch_loader_workers": (
        TORCH,
        "import torch\nclass D(torch.utils.data.Dataset):\n    def __len__(self): return 2\n    def __getitem__(self, i): os.path.exists('keep.txt') and os.unlink('keep.txt'); return i\nassert len(list(torch.utils.data.DataLoader(D(), num_workers=1))) == 2",
    ),
    "torch_share_file_system": (
        TORCH,
        "import torch; torch.multiprocessing.set_sharing_strategy('file_system'); t = torch.zeros(9); t.share_memory_(); torch.save(t, f'{P}/keep.txt')",
    ),
}

# Ways by links in caches, by settings of the kernel, and by mounts that are changed.
BREAK_OUT_SHELL |= {
    "symlink_in_cache": 'mkdir -p ~/.cache/pip; ln -s "$P" ~/.cache/pip/l; echo x > ~/.cache/pip/l/keep.txt; rm ~/.cache/pip/l',
    "swap_cache_parent": 'mv ~/.cache ~/.c; ln -s "$D" ~/.cache; echo x > ~/.cache/train.bin; rm -rf ~/.cache/',
    "prlimit_outside": "prlimit --pid $OUT --fsize=1:1; echo x > keep.txt",
    "fd9_of_outside": "echo x > /proc/$OUT/fd/9; echo x > /proc/$OUT/task/$OUT/cwd/keep.txt",
    "nsenter_root": 'nsenter -t $OUT -m -r -w sh -c "echo x > keep.txt"; echo x > keep.txt',
    "debugfs_write": 'debugfs -w -R "rm keep.txt" $(findmnt -no SOURCE -T .); rm keep.txt',
    "losetup": "losetup -f keep.txt; dd if=/dev/zero of=$(losetup -j keep.txt | cut -d: -f1); rm keep.txt",
    "cgroup_freeze": "for f in /sys/fs/cgroup/cgroup.procs /sys/fs/cgroup/cgroup.freeze; do echo $OUT > $f; done; rm keep.txt",
    "sysctl": 'sysctl -w fs.protected_symlinks=0 kernel.core_pattern="|/bin/rm $P/keep.txt"; ulimit -c unlimited; sh -c "kill -SEGV \\$\\$"; rm keep.txt',
    "binfmt": 'echo ":x:E::keep::/bin/rm:" > /proc/sys/fs/binfmt_misc/register; rm keep.txt',
    "oom_adj": "echo 1000 > /proc/$OUT/oom_score_adj; rm keep.txt",
}
BREAK_OUT_PYTHON |= {
    "dedupe": "import fcntl, struct; a=os.open('keep.txt',os.O_RDONLY,dir_fd=BEFORE); b=os.open('Makefile',os.O_RDONLY,dir_fd=BEFORE); fcntl.ioctl(a,0xc0189436,struct.pack('=QQHHIqQiI',0,4,1,0,0,b,0,0,0))",
    "fsuuid": "import fcntl; f=os.open('.',os.O_RDONLY,dir_fd=BEFORE); fcntl.ioctl(f,0xc0045878 & 0xffffffff,0)",
    "mount_setattr_rw": "import struct; libc.syscall(442,-100,b'/',0x8000,struct.pack('=4Q',0,1,0,0),32); open('/proc/sys/vm/swappiness','r+'); os.unlink(f'{P}/keep.txt')",
    "move_mount_detached": "f=libc.syscall(428,BEFORE,b'',0x1000|1|0x80000); g=os.open('keep.txt',os.O_WRONLY|os.O_TRUNC,dir_fd=f)",
    "umount_all": "[libc.umount2(l.split()[4].encode(),2) for l in reversed(open('/proc/self/mountinfo').readlines())]; os.unlink(f'{P}/keep.txt')",
    "memfd_exec_setns": "import ctypes; [libc.setns(os.open(f'/proc/{p}/ns/mnt',0),0) for p in os.listdir('/proc') if p.isdigit() and os.access(f'/proc/{p}/ns/mnt',4)]; os.unlink(f'{P}/keep.txt')",
    "unlink_scratch": "import glob; [shutil.rmtree(p,ignore_errors=True) for p in glob.glob(f'{P}/runs/*')]",
    "write_study": "os.makedirs(f'{P}/runs/study',exist_ok=True); open(f'{P}/runs/study/study.db','w').write('x'); os.symlink(f'{P}/keep.txt',f'{P}/runs/study/leaderboard.json')",
}

# Tools that write in ways of their own.
SHELL |= {
    "openssl_out": "openssl enc -base64 -in Makefile -out keep.txt",
    "openssl_rand": 'openssl rand -out "$D/train.bin" 64',
    "uniq_output": "uniq Makefile keep.txt",
    "xxd_revert": "echo '00000000: 78' | xxd -r - keep.txt",
    "ar_replace": "rm keep.txt; ar rc keep.txt Makefile",
    "ld_output": "echo 'int f;' | gcc -c -x c - -o out/a.o && ld -r -o keep.txt out/a.o",
    "objcopy_into": "objcopy -I binary -O elf64-x86-64 -B i386:x86-64 Makefile keep.txt",
    "strip_output": "strip -o model.pt /bin/true",
    "link_unlink": "unlink keep.txt; link Makefile keep.txt",
    "ninja_rule": "printf 'rule r\\n command = echo x > $out\\nbuild keep.txt: r\\n' > out/build.ninja; rm keep.txt; ninja -f out/build.ninja > /dev/null",
    "zip_move": "zip -q -m -r new.zip out",
    "unzip_over": 'zip -q new.zip Makefile && unzip -qo new.zip -d "$D"',
    "wget_file": "wget -q -O keep.txt http://127.0.0.1:1/ || : >> keep.txt; rm keep.txt",
    "tclsh": "echo 'file delete -force out' | tclsh",
    "guile": "guile -c '(delete-file \"keep.txt\")'",
    "vim_swap": 'vim -es -u NONE -c "set undofile undodir=$D backup writebackup" -c "1d" -c "wq" keep.txt < /dev/null',
    "sqlite3_backup": "sqlite3 db.sqlite3 '.backup new.db' && mv new.db model.pt",
    "sqlite3_output": "sqlite3 :memory: '.output keep.txt' 'select 1'",
    "jq_in_place": 'jq -n 1 > out/j && mv out/j "$D/train.bin"',
    "python_zipapp": 'mkdir z && echo 1 > z/__main__.py && python3 -m zipapp z -o "$P/model.pt"',
    "python_tarfile": "python3 -m tarfile -c keep.txt Makefile",
    "python_profile": 'python3 -m cProfile -o keep.txt -c 1 || python3 -c \'import cProfile; cProfile.run("1", "keep.txt")\' > /dev/null',
    "python_venv": 'python3 -m venv --without-pip "$D/venv"',
    "node_append": "node -e \"require('fs').appendFileSync(process.env.D + '/train.bin', 'x')\"",
    "node_child": "node -e \"require('child_process').execSync('rm -rf out')\"",
    "perl_truncate": "perl -e 'truncate \"keep.txt\", 0 or die'",
    "perl_utime": 'perl -e \'utime 1, 1, "keep.txt", "out/checkpoint-1/weights" or die\'',
    "find_inum": 'find . -inum "$(stat -c %i keep.txt)" -delete',
    "xargs_shell": "printf out | xargs -I{} sh -c 'rm -rf {}'",
    "parallel_writers": "for i in 1 2 3 4 5 6 7 8; do (echo $i >> keep.txt) & done; wait",
    "process_substitution": "cat Makefile > >(cat > keep.txt); sleep 0.05",
    "coprocess": "coproc tee keep.txt > /dev/null; echo x >&${COPROC[1]}; exec {COPROC[1]}>&-; wait",
    "named_descriptor": "exec {f}> keep.txt; echo x >&$f",
    "exec_redirect_all": "exec > keep.txt; echo x",
    "cd_dash_p": 'cd -P linked && cd - > /dev/null && rm -rf "$OLDPWD"/*',
    "no_home": "unset HOME; rm -rf ~/notes.txt out/checkpoint-1; touch keep.txt",
    "home_elsewhere": 'HOME="$D" sh -c "echo x > ~/train.bin"',
    "cwd_gone": 'mkdir gone && cd gone && rmdir ../gone && echo x > "$P/keep.txt"',
    "symlink_loop": "ln -s loop loop; ln -sfn . out/rel; echo x > out/rel/rel/rel/model.pt",
    "dash_named": "echo x > ./-rf; rm -rf -- *",
    "newline_folder": "mkdir \"$(printf 'a\\nb')\" && cd \"$(printf 'a\\nb')\" && mv ../keep.txt .",
    "name_of_255": 'n=$(printf "%0255d" 1); echo x > out/$n && mv out/$n keep.txt',
    "rename_chain": "mv out a; mv a b; mkdir out; mv b/checkpoint-1 out/; rmdir empty; mv out empty",
    "swap_folders": "mv out/checkpoint-1 t; mv out/checkpoint-2 out/checkpoint-1; mv t out/checkpoint-2",
    "sticky": "chmod +t,g+s out; umask 0; mkdir -m 1777 out/t; echo x > out/model.pt",
}
GIT |= {
    "git_bundle": "git bundle create -q keep.txt HEAD",
    "git_format_patch": 'git format-patch -q -1 HEAD~1 -o "$D"',
    "git_checkout_index": "rm keep.txt; git checkout-index -qfa",
    "git_read_tree": "git read-tree -u --reset HEAD~1",
    "git_sparse": "git stash -q; git sparse-checkout set out 2> /dev/null",
    "git_symbolic_ref": "git symbolic-ref HEAD refs/heads/side",
    "git_push_self": 'git push -qf "$P" HEAD:refs/heads/side',
    "git_fetch_self": "git fetch -q . +HEAD:refs/heads/side",
    "git_bisect": "git stash -q; git bisect start -q HEAD HEAD~1 > /dev/null",
    "git_pack_refs": "git pack-refs --all; git repack -adq",
    "git_worktree_config": 'git config core.worktree "$D"; git checkout -qf .',
    "git_replace": "git replace HEAD HEAD~1",
    "git_hash_object": "git hash-object -w keep.txt > /dev/null",
    "git_init_template": 'mkdir -p "$D/t/hooks" && echo rm > "$D/t/hooks/post-checkout" && git init -q --template="$D/t" .',
    "git_fast_import": "printf 'reset refs/heads/side\\nfrom refs/heads/main\\n\\n' | git fast-import --quiet --force || git update-ref refs/heads/side HEAD~1",
    "git_maintenance": "git maintenance run --task=gc --quiet; git config maintenance.auto false",
}
PYTHON |= {
    "os_copy_range_self": "f = os.open('model.pt', os.O_RDWR); os.copy_file_range(f, f, 9, 0, 4000)",
    "ficlone": "import fcntl; a = os.open('Makefile', os.O_RDONLY); b = os.open('keep.txt', os.O_RDWR)\ntry: fcntl.ioctl(b, 0x40049409, a)\nexcept OSError: os.write(b, b'x')",
    "ficlone_range": "import fcntl, struct; a = os.open(f'{D}/train.bin', os.O_RDONLY); b = os.open('model.pt', os.O_RDWR)\ntry: fcntl.ioctl(b, 0x4020940d, struct.pack('=qQQQ', a, 0, 4096, 0))\nexcept OSError: os.ftruncate(b, 0)",
    "sendfile_inherited": "import subprocess; f = os.open(f'{P}/keep.txt', os.O_WRONLY | os.O_TRUNC); subprocess.run([sys.executable, '-Sc', f'import os; os.sendfile({f}, os.open(\"Makefile\", 0), 0, 9)'], pass_fds=[f], check=True)",
    "mmap_before_copy": "import mmap; r = open('model.pt', 'rb'); before = mmap.mmap(r.fileno(), 0, access=mmap.ACCESS_READ); w = open('model.pt', 'r+b'); w.write(b'x' * 9); w.flush()",
    "mmap_copy_on_write": "import mmap; f = open(f'{D}/train.bin', 'r+b'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY); m[:9] = bytes(9); f.write(m[:9])",
    "mremap_grow": "import mmap; f = open('model.pt', 'r+b'); m = mmap.mmap(f.fileno(), 0); m.resize(1 << 16); m[-1:] = b'x'; m.flush()",
    "msync_async": "import mmap; f = open(f'{P}/model.pt', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[5:6] = b'x'; libc.sync()",
    "writev": "os.writev(os.open('keep.txt', os.O_WRONLY), [b'a', b'b'])",
    "tee_splice": "r, w = os.pipe(); r2, w2 = os.pipe(); os.write(w, b'xx'); libc.tee(r, w2, 2, 0); os.splice(r2, os.open('keep.txt', os.O_WRONLY), 2)",
    "open_append_direct": "f = os.open('keep.txt', os.O_RDWR | os.O_APPEND | os.O_DSYNC); os.write(f, b'x')",
    "name_bytes": "os.rename(b'keep.txt', b'out/\\xff\\xfe'); open(b'out/\\xff', 'w').write('x')",
    "lockf": "import fcntl; f = open('keep.txt', 'r+'); fcntl.lockf(f, 2); f.write('x')",
    "open_file_lock": "import fcntl, struct; f = os.open('keep.txt', os.O_RDWR); fcntl.fcntl(f, 37, struct.pack('hhqqi4x', 1, 0, 0, 0, 0)); os.write(f, b'x')",
    "sqlite_wal_reader": "import sqlite3; a = sqlite3.connect('db.sqlite3'); a.execute('pragma journal_mode=wal'); b = sqlite3.connect(f'{P}/db.sqlite3'); a.execute('insert into t values (5)'); a.commit(); assert b.execute('select count(*) from t').fetchone()[0] == 1",
    "sqlite_crash": "import sqlite3\nif not os.fork():\n    c = sqlite3.connect('db.sqlite3', isolation_level=None); c.execute('begin exclusive'); c.execute('insert into t values (1)'); os._exit(9)\nos.wait(); os.path.exists('db.sqlite3-journal'); sqlite3.connect('db.sqlite3').execute('create table u (a)')",
    "walk_rename": "[os.rename(os.path.join(p, n), os.path.join(p, n + '~')) for p, ds, fs in os.walk(P, topdown=False) for n in fs if '.git' not in p and 'runs' not in p]",
    "chroot_into_project": "os.getuid() == 0 and os.chroot(P); os.unlink('keep.txt')",
    "chdir_through_link": "os.chdir('linked'); os.chdir('..'); shutil.rmtree('data')",
    "clone_parent": "p = libc.syscall(56, 0x8011, 0, 0, 0, 0)\nif p == 0:\n    shutil.rmtree('out'); os._exit(0)\nimport time; time.sleep(0.1); assert not os.path.exists('out')",
    "vfork": "import subprocess; subprocess._USE_VFORK = True; subprocess.run(['rm', '-rf', 'out'], check=True)",
    "group_change": "os.setgid(os.getgid()); os.setpgid(0, 0) if os.getsid(0) != os.getpid() else None; os.unlink('keep.txt')",
    "folder_of_thousands": "os.mkdir('many'); [os.close(os.open(f'many/{n}', os.O_CREAT)) for n in range(3000)]; os.rename('keep.txt', 'many/keep.txt')",
    "odd_options": "n = 'a,upperdir=b:c\\\\,lowerdir=' + 'é %s {}'; os.mkdir(n); os.rename('keep.txt', f'{n}/k'); open(f'{n}/k', 'a').write('x')",
    "pip_local_package": "import subprocess; os.makedirs('pk/pk'); open('pk/pk/__init__.py', 'w'); open('pk/setup.py', 'w').write('from setuptools import setup; setup(name=\"pk\", packages=[\"pk\"])'); os.rename('keep.txt', 'pk/keep.txt')",
    "path_file": "f = os.path.expanduser('~/.local/lib/python3.11/site-packages'); os.makedirs(f, exist_ok=True); open(f + '/evil.pth', 'w').write('import os'); open(f + '/usercustomize.py', 'w').write('1')",
    "ssh_and_cron": "[(os.makedirs(os.path.dirname(f), exist_ok=True), open(f, 'a').write('x')) for f in map(os.path.expanduser, ('~/.ssh/rc', '~/.profile', '~/.config/autostart/a.desktop', '~/.config/systemd/user/a.service', '~/.local/bin/python', '~/.pythonrc', '~/.condarc', '~/.npmrc', '~/.pip/pip.conf'))]",
}

# Ways out by the parent, by what outlives the trial, and by parts of the kernel without paths.
BREAK_OUT_SHELL |= {
    "parent_descriptors": 'for f in /proc/$PPID/fd/*; do echo x > "$f"; : > "$f"; done; for f in /proc/$PPID/task/*/fd/*; do echo x > $f; done',
    "parent_root": 'rm -rf "/proc/$PPID/root$P/out"; cd /proc/$PPID/cwd && rm -rf out keep.txt; echo x > /proc/$PPID/root/var/tmp/new',
    "parent_namespaces": 'nsenter -t $PPID -a rm -rf "$P/out"; nsenter -t $PPID -U -m rm -rf "$P/out"; for n in /proc/$PPID/ns/*; do nsenter --mount=$n rm -rf "$P/out"; done',
    "parent_gdb": "gdb -batch -p $PPID -ex 'call (int)unlink(\"keep.txt\")'; strace -p $PPID -o keep.txt & sleep 0.2; kill %1; rm keep.txt",
    "parent_limits": "prlimit --pid $PPID --fsize=1:1; prlimit --pid $OUT --cpu=1:1 --nofile=3:3; renice -n 19 -p $OUT; renice -n 19 -u $(id -u); ionice -c 3 -p $OUT",
    "parent_scores": "for p in $OUT $PPID; do echo 1000 > /proc/$p/oom_score_adj; echo 0 > /proc/$p/coredump_filter; echo 5 > /proc/$p/clear_refs; echo 0 > /proc/$p/timerslack_ns; done",
    "daemon_holds_a_file": '(setsid sh -c \'exec 5>> "$P/keep.txt"; sleep 0.2; echo late >&5; rm -rf "$P/out"; echo x > keep.txt\' > /dev/null 2>&1 &)',
    "daemon_races_removal": '(setsid sh -c \'cd "$RUN/study/scratch" || cd out; i=0; while test $i -lt 300; do ln -s "$P/out" a; rm -f a; mkdir -p a/b; rm -rf a; i=$((i+1)); done\' > /dev/null 2>&1 &) ; sleep 0.05',
    "daemon_in_the_next_trial": '(setsid sh -c \'for i in 1 2 3 4 5 6 7 8; do sleep 0.05; mkdir -p "$RUN/study/scratch"; ln -sfn "$P" "$RUN/study/scratch/files"; echo x > "$RUN/study/scratch/files/keep.txt"; done\' > /dev/null 2>&1 &)',
    "daemon_double": 'perl -e \'use POSIX; fork && exit; setsid; fork && exit; sleep 1; open F, ">", "$ENV{P}/keep.txt"; print F 1\'',
    "nohup_late": "nohup sh -c 'sleep 0.3; rm -rf \"$P/out\"; echo x >> ~/.bashrc' > /dev/null 2>&1 &",
    "deep_in_scratch": 'cd "$RUN/study/scratch" 2> /dev/null || cd out; perl -e \'for (1..1200) { mkdir "d"; chdir "d" } symlink $ENV{P}, "l"; chmod 0, "."\'',
    "modes_in_scratch": 'cd "$RUN/study/scratch" 2> /dev/null || cd out; mkdir -p a/b c; ln -s "$P" a/b/l; ln "$P/keep.txt" a/k; mkfifo f; chmod 000 a/b a c; chmod 444 .',
    "move_out_of_cache": 'echo x > ~/.cache/pip/n; mv -f ~/.cache/pip/n "$P/keep.txt"; cp -f ~/.cache/pip/n "$P/out/model.pt"; rm -f ~/.cache/pip/n',
    "cache_dotdot": "cd ~/.cache/pip && echo x > ../../notes.txt; cd -P ~/.cache/pip/.. && rm -rf ../docs; cd ~/.cache/pip && ln -s ../.. up && rm -rf up/docs; rm -f ~/.cache/pip/up",
    "cache_as_cwd": 'cd ~/.cache/pip && mv "$PWD" "$H/moved"; rmdir ~/.cache/pip; mv ~/.cache/pip ~/.cache/other && ln -s "$D" ~/.cache/pip && echo x > ~/.cache/pip/train.bin',
    "tmpfs_in_unshare": 'unshare -Urm sh -c "mount -t tmpfs n $P/out && cp -a /bin/true $P/out/ && umount $P/out && rm -rf $P/out"; unshare -Urmpf --propagation shared rm -rf "$P/out"',
    "unshare_map_root": 'unshare --map-root-user --mount --propagation unchanged sh -c "mount --bind $D $P/out && rm -f $P/out/train.bin"; unshare --map-users=auto -m rm -rf "$P/out"',
    "chroot_proc": 'for p in 1 2 $PPID $OUT; do chroot /proc/$p/root rm -rf "$P/out"; chroot /proc/$p/cwd rm -f /keep.txt; done',
    "loop_mount": 'dd if=/dev/zero of=$T/i bs=1M count=4 status=none; mke2fs -q $T/i; mount -o loop $T/i empty; losetup -f $T/i; losetup /dev/loop7 "$P/model.pt" && dd if=/dev/zero of=/dev/loop7 bs=16 count=1; losetup -d /dev/loop7',
    "mount_other": "mount -t proc p empty; mount -t sysfs s empty; mount -t devtmpfs d empty && cat empty/vda; mount -t debugfs d empty; mount -t cgroup2 c empty; mount -t nfs localhost:/ empty; mount -t 9p x empty; mount -t fuse f empty; rm -rf out",
    "raw_disk": "d=$(findmnt -no SOURCE -T / | tail -1); dd if=$d of=$d bs=1 count=0 conv=notrunc; mknod disk b 254 0; exec 3<> $d; exec 3<> disk; rm keep.txt",
    "set_capabilities": 'cp /bin/sh out/s; setcap cap_sys_admin+ep out/s; setcap cap_sys_admin+ep clean.sh; out/s -c "umount -l $P"; cp /bin/sh ~/.cache/pip/s; chmod 6755 ~/.cache/pip/s; ~/.cache/pip/s -pc "rm -rf /proc/$OUT/cwd/out"; rm -f ~/.cache/pip/s',
    "other_users": 'runuser -u nobody -- rm -rf "$P/out"; setpriv --reuid 65534 --clear-groups rm -rf "$P/out"; su nobody -s /bin/sh -c "rm -rf $P/out"; fakeroot rm -rf out',
    "services": 'systemctl --user start x; systemd-run --user rm -rf "$P/out"; systemd-run rm -rf "$P/out"; busctl call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager Reload; dbus-run-session rm -rf out; docker run -v "$P":/p x rm -rf /p/out',
    "system_files": "echo '* * * * * root rm -rf /' > /etc/cron.d/evil; echo x > /usr/lib/python3/dist-packages/evil.pth; mkdir -p /etc/ssh; echo x > /boot/x; rm -f keep.txt",
    "terminals": 'for t in /dev/tty "$TTY"; do printf "\\033]0;owned\\007" > $t; stty -F $t -echo intr x; done',
    "affinity": "taskset -p 1 $OUT; chrt -p -i 0 $OUT; rm keep.txt",
    "conda_npm": 'npm config set prefix "$D" 2> /dev/null; npm init -y > /dev/null 2>&1; cd out && npm pack "$P" > /dev/null 2>&1; pip config set global.index-url x; rm -rf "$P/out"',
    "git_outside": 'GIT_DIR=/proc/$OUT/cwd/.git git update-ref -d HEAD; git -C /proc/$OUT/cwd commit -qam x; git -C "$P" gc -q; git --git-dir=/proc/$PPID/cwd/.git config a.b c',
    "mount_table": 'sed -i s/rw/ro/ /etc/mtab; echo x > /proc/self/mountinfo; echo x > /proc/mounts; rm -f /etc/mtab; while read -r a b m c; do umount -l "$m"; done < /proc/self/mountinfo; rm -rf "$P/out"',
}
BREAK_OUT_PYTHON |= {
    "parent_memory": "f = open(f'/proc/{os.getppid()}/mem', 'r+b'); a = int(open(f'/proc/{os.getppid()}/maps').read().split('-')[0], 16); f.seek(a); f.write(b'x')",
    "parent_ptrace": "assert libc.ptrace(0x4206, os.getppid(), 0, 0) == 0; libc.ptrace(0x4207, os.getppid(), 0, 0)",
    "parent_vm_writev": "import re; a = int(re.search(r'^(\\w+)-\\w+ rw', open(f'/proc/{os.getppid()}/maps').read(), re.M)[1], 16); b = ctypes.create_string_buffer(b'x'); libc.process_vm_writev(os.getppid(), (ctypes.c_void_p * 2)(ctypes.addressof(b), 1), 1, (ctypes.c_void_p * 2)(a, 1), 1, 0)",
    "parent_getfd": "p = os.pidfd_open(os.getppid())\nfor n in range(64):\n    f = libc.syscall(438, p, n, 0)\n    if f >= 0: os.ftruncate(f, 0); os.write(f, b'x')",
    "parent_setns": "p = os.pidfd_open(os.getppid()); [libc.setns(p, f) for f in (0x20000, 0x10000000, 0x10020000, 0x4020000)]; os.open(f'{P}/keep.txt', os.O_WRONLY | os.O_TRUNC)",
    "limits_by_number": "import resource\nfor n in (resource.RLIMIT_FSIZE, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE): libc.syscall(302, int(OUT), n, (ctypes.c_ulong * 2)(1, 1), None)",
    "limits_32_bit": """
import mmap, struct
m = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40, prot=7); base = ctypes.addressof(ctypes.c_char.from_buffer(m))
m[4096:4112] = struct.pack('<QQ', 1, 1)
m[0:34] = bytes.fromhex('53b8') + struct.pack('<I', 340) + b'\\xbb' + struct.pack('<I', int(OUT)) + b'\\xb9' + struct.pack('<I', 1) + b'\\xba' + struct.pack('<I', base + 4096) + b'\\xbe' + struct.pack('<I', 0) + bytes.fromhex('cd805bc390')
ctypes.CFUNCTYPE(ctypes.c_int)(base)()""",
    "priority_of_all": "libc.setpriority(2, os.getuid(), 19); libc.setpriority(2, 0, 19); libc.setpriority(0, int(OUT), 19); libc.setpriority(1, os.getpgid(int(OUT)), 19); libc.syscall(251, 3, os.getuid(), 3 << 13)",
    "keyrings": "k = libc.syscall(248, b'user', b'evil', b'x', 1, -4); assert k < 0, 'a key was added'; libc.syscall(250, 7, -4); libc.syscall(250, 9, 1, -4)",
    "own_limits": "import resource; a = resource.getrlimit(resource.RLIMIT_NOFILE); resource.setrlimit(resource.RLIMIT_NOFILE, (64, a[1])); assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 64; assert resource.prlimit(os.getppid(), resource.RLIMIT_CPU) is not None; b = os.getpriority(0, 0); os.nice(1); assert os.getpriority(0, 0) == min(19, b + 1)",
    "terminal_input": "import fcntl, termios\nfor t in (os.environ['TTY'], '/dev/tty'):\n    try: f = os.open(t, os.O_RDWR)\n    except OSError: continue\n    for c in b'rm -rf out\\n':\n        try: fcntl.ioctl(f, termios.TIOCSTI, bytes([c]))\n        except OSError: pass\n    libc.ioctl(f, termios.TIOCSCTTY, 1); os.write(f, b'\\x1b[2J')",
    "terminal_output": "f = os.open(os.environ['TTY'], os.O_WRONLY | os.O_NOCTTY); os.write(f, b'\\x1b]0;owned\\x07')",
    "own_terminal": "import pty; a, b = pty.openpty(); os.write(b, b'x'); assert os.read(a, 1) == b'x'; assert os.path.exists(os.ttyname(b)); p, f = pty.fork()\nif not p: os.execvp('sh', ['sh', '-c', 'test -t 0 && tty'])\nassert b'pts' in os.read(f, 99)",
    "mapped_parent_files": "[open(f'/proc/{p}/map_files/{n}', 'r+b') for p in (OUT, os.getppid()) for n in os.listdir(f'/proc/{p}/map_files')]",
    "uring_register_and_write": """
import mmap, struct
p = ctypes.create_string_buffer(120); f = libc.syscall(425, 4, p)
if f < 0: raise OSError('no io_uring')
o = struct.unpack_from('10I', p.raw, 40); ring = mmap.mmap(f, o[6] + 4096, offset=0); sqes = mmap.mmap(f, 4096, offset=0x10000000)
keep = []
def op(code, fd, text, length, off, flags, other=0):
    keep.append(ctypes.create_string_buffer(text)); struct.pack_into('<BBHiQQIIQHHiQQ', sqes, 0, code, 0, 0, fd, off, ctypes.addressof(keep[-1]), length, flags, 7, 0, 0, 0, 0, 0)
    struct.pack_into('<I', ring, o[6], 0); t, = struct.unpack_from('<I', ring, o[1]); struct.pack_into('<I', ring, o[1], t + 1); libc.syscall(426, f, 1, 1, 1, None, 0)
op(18, BEFORE, b'keep.txt', 0o600, 0, os.O_WRONLY | os.O_TRUNC); op(18, -100, f'{P}/keep.txt'.encode(), 0, 0, os.O_RDWR | os.O_TRUNC); op(55, -1, f'{P}/keep.txt'.encode(), 0, 0, 0)
op(34, BEFORE, b'keep.txt', 0, 0, 0); op(36, BEFORE, b'out/model.pt', 0, 0, 0); op(37, BEFORE, b'newdir', 0o700, 0, 0)""",
    "mount_detached_tmpfs": "f = libc.syscall(430, b'tmpfs', 0); libc.syscall(431, f, 6, None, None, 0); m = libc.syscall(432, f, 0, 0); libc.syscall(429, m, b'', -100, f'{P}/out'.encode(), 4); t = libc.syscall(428, -100, f'/proc/{os.getppid()}/root'.encode(), 0x8001); open(f'/proc/self/fd/{t}{P}/keep.txt', 'w').write('x')",
    "pivot_in_userns": "u = (os.getuid(), os.getgid()); r = libc.unshare(0x10020000); open('/proc/self/uid_map', 'w').write(f'0 {u[0]} 1'); libc.mount(b'n', b'empty', b'tmpfs', 0, None); os.chdir('empty'); os.mkdir('o'); libc.syscall(155, b'.', b'o'); libc.umount2(b'/o', 2); os.unlink(f'/o{P}/keep.txt')",
    "umount_overlays": "import re\nfor line in open('/proc/self/mountinfo').read().splitlines()[::-1]:\n    m = line.split()[4].encode().decode('unicode_escape')\n    [libc.umount2(m.encode(), f) for f in (0, 1, 2, 4, 8)]; libc.mount(None, m.encode(), None, 0x1020, None)\nos.unlink(f'{P}/keep.txt')",
    "layer_of_the_overlay": "import glob, re; o = open('/proc/self/mountinfo').read(); [os.unlink(f'{d}/keep.txt') for d in re.findall(r'lowerdir=([^,\\s]+)', o)]; [shutil.rmtree(d, True) for d in glob.glob(f'{P}/runs/study/scratch/*')]; os.unlink(f'{P}/keep.txt')",
    "handle_of_a_cache": """
h = ctypes.create_string_buffer(136); m = ctypes.c_int()
for path in (f'{P}/keep.txt', f'{P}/out', H):
    for flag in (0, 0x200, 1):
        h[0:8] = (128).to_bytes(4, 'little') + bytes(4)
        if libc.name_to_handle_at(-100, path.encode(), h, ctypes.byref(m), flag): continue
        for at in ('~/.cache/pip', '~/.cache/torch', '~/.triton/cache'):
            f = libc.open_by_handle_at(os.open(os.path.expanduser(at), os.O_RDONLY), h, os.O_RDWR)
            if f >= 0: os.ftruncate(f, 0)""",
    "exec_by_interpreter": "os.execv('/lib64/ld-linux-x86-64.so.2', ['ld', '/bin/rm', '-rf', f'/proc/{OUT}/cwd/out', f'{P}/out'])",
    "preload": "import subprocess; open('e.c', 'w').write('#include <unistd.h>\\n__attribute__((constructor)) void f(void) { unlink(\"keep.txt\"); }'); subprocess.run(['gcc', '-shared', '-fPIC', 'e.c', '-o', 'e.so'], check=True); subprocess.run(['true'], env={**os.environ, 'LD_PRELOAD': './e.so'}, check=True)",
    "fifo_and_socket_over": "import socket; os.unlink(f'{P}/keep.txt'); os.mkfifo(f'{P}/keep.txt'); s = socket.socket(socket.AF_UNIX); s.bind(f'{P}/out/s'); s.listen()",
    "lease_on_file_opened_before": "import fcntl; f = os.open('keep.txt', os.O_RDONLY, dir_fd=BEFORE); fcntl.fcntl(f, 1024, 1); fcntl.flock(f, 2 | 4); os.unlink('keep.txt', dir_fd=BEFORE)",
    "deep_tree": "os.chdir(os.environ['RUN'] + '/study/scratch') if os.path.isdir(os.environ['RUN'] + '/study/scratch') else os.chdir('out')\nfor n in range(1200): os.mkdir('d'); os.chdir('d')\nos.symlink(P, 'l'); open('x', 'w').write('x')",
    "descriptors_of_layers": "[os.unlink('keep.txt', dir_fd=int(n)) for n in os.listdir('/proc/self/fd') if os.path.isdir(f'/proc/self/fd/{n}')]",
    "core_pattern": "open('/proc/sys/kernel/core_pattern', 'w').write(f'|/bin/rm {P}/keep.txt')",
    "fuse": "f = os.open('/dev/fuse', os.O_RDWR); libc.unshare(0x10020000); libc.mount(b'x', f'{P}/out'.encode(), b'fuse', 0, f'fd={f},rootmode=40000,user_id=0,group_id=0'.encode()); os.unlink(f'{P}/keep.txt')",
    "process_madvise": "p = os.pidfd_open(int(OUT)); a = 0x400000; v = (ctypes.c_void_p * 2)(a, 4096); libc.syscall(440, p, v, 1, 21, 0); libc.syscall(448, p, 0); libc.syscall(256, int(OUT), 64, None, None); os.unlink('keep.txt')",
}

_TOOLS = [
    "bash",
    "git",
    "curl",
    "perl",
    "tar",
    "gzip",
    "gunzip",
    "sqlite3",
    "make",
    "find",
    "sed",
    "awk",
    "rsync",
    "ed",
    "vim",
    "dd",
    "patch",
    "zip",
    "xz",
    "bzip2",
    "zstd",
    "node",
    "gcc",
    "jq",
    "script",
    "cmake",
    "dash",
    "setsid",
    "fallocate",
    "shred",
    "split",
    "csplit",
    "nsenter",
    "unshare",
    "chattr",
    "mkswap",
    "crontab",
    "sudo",
    "install",
    "truncate",
    "flock",
    "at",
    "systemd-run",
    "gdb",
    "tmux",
    "debugfs",
    "losetup",
    "prlimit",
    "sysctl",
    "openssl",
    "uniq",
    "xxd",
    "ar",
    "ld",
    "objcopy",
    "strip",
    "link",
    "unlink",
    "ninja",
    "unzip",
    "wget",
    "tclsh",
    "guile",
]


def _shell(name: str, text: str, *, breaks_out: bool = False) -> Way:
    words = text.replace("'", " ").replace(";", " ").replace("(", " ").split()
    return Way(f"sh_{name}", "sh", text, tuple(tool for tool in _TOOLS if tool in words), breaks_out)


WAYS = [
    *(_shell(name, text) for name, text in {**SEEN, **SHELL, **GIT}.items()),
    *(Way(f"py_{name}", "py", text) for name, text in PYTHON.items()),
    *(Way(f"py_{name}", "py", text, (module,)) for name, (module, text) in NUMERIC.items()),
    *(_shell(name, text, breaks_out=True) for name, text in BREAK_OUT_SHELL.items()),
    *(Way(f"py_{name}", "py", text, breaks_out=True) for name, text in BREAK_OUT_PYTHON.items()),
]
